"""Hugging Face's models from small configurations, each with a mask and padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .model import CLASSES, EXAMPLES, LENGTH, WORDS, Model, causal_loss, logits_loss, seeded, texts, token_loss

__all__ = ["MODELS", "bert", "gpt2", "llama"]

WIDTH = 8
TEXT = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0}
ENCODER = {
    **TEXT,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 12,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}


def made(config: str, head: str, dropout: float, drops: tuple[str, ...], options: dict[str, Any]) -> nn.Module:
    """The model of that name from its configuration.

    Args:
        config: The configuration's name.
        head: The model's name.
        dropout: The probability.
        drops: The options that it is given as.
        options: All others.
    """
    import transformers

    configuration = getattr(transformers, config)(**options, **dict.fromkeys(drops, dropout))
    return getattr(transformers, head)(configuration)


BERT_DROPS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2 = {**TEXT, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 12, "bos_token_id": 1, "eos_token_id": 2}
GPT2_DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def bert(dropout: float, head: str = "BertForSequenceClassification") -> nn.Module:
    """BERT with a head."""
    return made("BertConfig", head, dropout, BERT_DROPS, ENCODER)


def gpt2(dropout: float, head: str = "GPT2LMHeadModel") -> nn.Module:
    """GPT-2 with a head."""
    return made("GPT2Config", head, dropout, GPT2_DROPS, GPT2)


def llama(dropout: float, head: str = "LlamaForCausalLM") -> nn.Module:
    """Llama with a head."""
    return made("LlamaConfig", head, dropout, ("attention_dropout",), DECODER)


def encoder(
    name: str, private: str, drops: tuple[str, ...] = BERT_DROPS, config: str | None = None, **more: Any
) -> Model:
    """A text classifier."""
    config = config or name.partition("For")[0] + "Config"
    build = partial(_build, config=config, head=name, drops=drops, options={**ENCODER, **more})
    return Model(name, "transformers", build, texts, logits_loss, loss_inside=True, private=private)


def decoder(name: str, private: str, drops: tuple[str, ...] = ("attention_dropout",), **more: Any) -> Model:
    """A causal language model, or a classifier made of one."""
    config = name.partition("For")[0] + "Config"
    build = partial(_build, config=config, head=name, drops=drops, options={**DECODER, **more})
    causal = "Causal" in name
    data = partial(texts, "words") if causal else texts
    loss = causal_loss if causal else logits_loss
    return Model(name, "transformers", build, data, loss, loss_inside=True, private=private)


def vision(name: str, drops: tuple[str, ...], channels: int = 3, size: int = 8, **more: Any) -> Model:
    """An image classifier."""
    config = name.partition("For")[0] + "Config"
    options = {"num_labels": CLASSES, "num_channels": channels, "image_size": size, **more}
    build = partial(_build, config=config, head=name, drops=drops, options=options)
    return Model(name, "transformers", build, partial(pixels, channels, size), logits_loss, loss_inside=True)


def _build(dropout: float, **options: Any) -> nn.Module:
    return made(dropout=dropout, **options)


def pixels(channels: int = 3, size: int = 8) -> list[dict[str, Tensor]]:
    """Pictures as an image processor gives them."""
    source = seeded()
    return [
        {
            "pixel_values": torch.randn(channels, size, size, generator=source, dtype=torch.float64),
            "labels": torch.randint(CLASSES, (), generator=source),
        }
        for _ in range(EXAMPLES)
    ]


def sounds(length: int = 40) -> list[dict[str, Tensor]]:
    """Waves with a class each."""
    source = seeded()
    return [
        {
            "input_values": torch.randn(length, generator=source, dtype=torch.float64),
            "labels": torch.randint(CLASSES, (), generator=source),
        }
        for _ in range(EXAMPLES)
    ]


def spectra(bins: int = 8, length: int = 8) -> list[dict[str, Tensor]]:
    """Spectrograms with a class each."""
    source = seeded()
    return [
        {
            "input_features": torch.randn(bins, length, generator=source, dtype=torch.float64),
            "labels": torch.randint(CLASSES, (), generator=source),
        }
        for _ in range(EXAMPLES)
    ]


def pairs() -> list[dict[str, Tensor]]:
    """Texts and their translations, with the decoder's input as ``DataCollatorForSeq2Seq`` makes it."""
    source = seeded(1)
    examples = []
    for i, example in enumerate(texts()):
        words = torch.randint(3, WORDS, (LENGTH - 1,), generator=source)
        words[LENGTH - 1 - i % 2 :] = -100
        shifted = torch.cat([words.new_zeros(1), words[:-1]]).clamp(min=0)
        examples.append({**example, "decoder_input_ids": shifted, "labels": words})
    return examples


T5 = {
    **TEXT,
    "d_model": WIDTH,
    "d_kv": 4,
    "d_ff": WIDTH,
    "num_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 4,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "feed_forward_proj": "gated-gelu",
}


def wav2vec2(dropout: float) -> nn.Module:
    """Wav2Vec 2 as it is fine-tuned."""
    options = {
        **ENCODER,
        "conv_dim": [4, 4],
        "conv_kernel": [4, 3],
        "conv_stride": [3, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 3,
        "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": 6,
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
        "feat_extract_norm": "layer",
        "do_stable_layer_norm": True,
    }
    drops = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout")
    model: Any = made("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", dropout, drops, options)
    model.freeze_feature_encoder()
    return model


def segmented() -> list[dict[str, Tensor]]:
    """Texts with token types."""
    return texts(segments=True)


def unpadded() -> list[dict[str, Tensor]]:
    """Texts of their own lengths."""
    return [
        {key: value[: int(example["attention_mask"].sum())] if value.ndim else value for key, value in example.items()}
        for example in texts()
    ]


def to_the_longest(examples: list[dict[str, Tensor]]) -> Any:
    """A batch as ``DataCollatorWithPadding`` makes it."""
    from transformers import BatchEncoding

    columns = {key: [example[key] for example in examples] for key in examples[0]}
    return BatchEncoding(
        {key: pad_sequence(column, True) if column[0].ndim else torch.stack(column) for key, column in columns.items()}
    )


def ending() -> list[dict[str, Tensor]]:
    """Texts that end in the same word, each once, as T5's classifier wants it."""
    examples = texts()
    for example in examples:
        example["input_ids"][int(example["attention_mask"].sum()) - 1] = 2
    return examples


def hidden_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the logits, and a penalty of the first layer's inputs and outputs."""
    return logits_loss(outputs, labels) + 0.1 * sum(state.square().mean() for state in outputs.hidden_states)


BART = {
    **TEXT,
    "d_model": WIDTH,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": WIDTH for side in ("encoder", "decoder")},
    "max_position_embeddings": 12,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WORDS_OF_BERT = "bert.embeddings.word_embeddings"
MODELS = [
    encoder("BertForSequenceClassification", WORDS_OF_BERT),
    Model(
        "BertForSequenceClassification, token_type_ids",
        "transformers",
        bert,
        segmented,
        logits_loss,
        loss_inside=True,
        private=WORDS_OF_BERT,
    ),
    Model(
        "BertForSequenceClassification, padded to each batch's longest",
        "transformers",
        bert,
        unpadded,
        logits_loss,
        loss_inside=True,
        private=WORDS_OF_BERT,
        collate=to_the_longest,
    ),
    Model(
        "BertForSequenceClassification, a loss on its hidden states",
        "transformers",
        partial(
            _build,
            config="BertConfig",
            head="BertForSequenceClassification",
            drops=BERT_DROPS,
            options={**ENCODER, "output_hidden_states": True},
        ),
        texts,
        hidden_loss,
        private=WORDS_OF_BERT,
        criterion_needed=True,
    ),
    Model(
        "BertForTokenClassification",
        "transformers",
        partial(bert, head="BertForTokenClassification"),
        partial(texts, "tokens"),
        token_loss,
        loss_inside=True,
        private=WORDS_OF_BERT,
    ),
    Model(
        "BertForMaskedLM (tied)",
        "transformers",
        partial(bert, head="BertForMaskedLM"),
        partial(texts, "words"),
        token_loss,
        loss_inside=True,
        private=WORDS_OF_BERT,
    ),
    encoder("RobertaForSequenceClassification", "roberta.embeddings.word_embeddings", pad_token_id=0),
    encoder(
        "DistilBertForSequenceClassification",
        "distilbert.embeddings.word_embeddings",
        ("dropout", "attention_dropout", "seq_classif_dropout"),
        dim=WIDTH,
        n_layers=1,
        n_heads=2,
        hidden_dim=WIDTH,
    ),
    encoder("ElectraForSequenceClassification", "electra.embeddings.word_embeddings", embedding_size=6),
    encoder(
        "AlbertForSequenceClassification",
        "albert.embeddings.word_embeddings",
        (*BERT_DROPS, "classifier_dropout_prob"),
        embedding_size=6,
        num_hidden_layers=2,
    ),
    encoder(
        "DebertaV2ForSequenceClassification",
        "deberta.embeddings.word_embeddings",
        (*BERT_DROPS, "pooler_dropout"),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pooler_hidden_size=WIDTH,
        type_vocab_size=0,
    ),
    Model(
        "GPT2LMHeadModel (tied)",
        "transformers",
        gpt2,
        partial(texts, "words"),
        causal_loss,
        loss_inside=True,
        private="transformer.wte",
    ),
    Model(
        "GPT2ForSequenceClassification",
        "transformers",
        partial(gpt2, head="GPT2ForSequenceClassification"),
        texts,
        logits_loss,
        loss_inside=True,
        private="transformer.wte",
    ),
    decoder("LlamaForCausalLM", "model.embed_tokens"),
    decoder("LlamaForSequenceClassification", "model.embed_tokens"),
    decoder("MistralForCausalLM", "model.embed_tokens", sliding_window=4),
    decoder("Qwen2ForCausalLM", "model.embed_tokens"),
    decoder("Qwen3ForCausalLM", "model.embed_tokens"),
    decoder("GemmaForCausalLM", "model.embed_tokens"),
    decoder(
        "OPTForCausalLM",
        "model.decoder.embed_tokens",
        ("dropout", "attention_dropout"),
        ffn_dim=WIDTH,
        word_embed_proj_dim=WIDTH,
    ),
    decoder("GPTNeoXForCausalLM", "gpt_neox.embed_in", ("hidden_dropout", "attention_dropout")),
    decoder(
        "PhiForCausalLM",
        "model.embed_tokens",
        ("resid_pdrop", "embd_pdrop", "attention_dropout"),
        partial_rotary_factor=0.5,
    ),
    Model(
        "T5ForConditionalGeneration",
        "transformers",
        partial(_build, config="T5Config", head="T5ForConditionalGeneration", drops=("dropout_rate",), options=T5),
        pairs,
        token_loss,
        loss_inside=True,
        private=("encoder.embed_tokens", "decoder.embed_tokens"),
    ),
    Model(
        "BartForConditionalGeneration",
        "transformers",
        partial(_build, config="BartConfig", head="BartForConditionalGeneration", drops=("dropout",), options=BART),
        pairs,
        token_loss,
        loss_inside=True,
        private=("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
    ),
    Model(
        "T5ForSequenceClassification",
        "transformers",
        partial(
            _build,
            config="T5Config",
            head="T5ForSequenceClassification",
            drops=("dropout_rate", "classifier_dropout"),
            options=T5,
        ),
        ending,
        logits_loss,
        loss_inside=True,
        private=("transformer.encoder.embed_tokens", "transformer.decoder.embed_tokens"),
    ),
    vision(
        "ViTForImageClassification",
        BERT_DROPS,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=WIDTH,
    ),
    vision(
        "DeiTForImageClassification",
        BERT_DROPS,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=WIDTH,
    ),
    vision(
        "SwinForImageClassification",
        ("drop_path_rate", *BERT_DROPS),
        patch_size=2,
        embed_dim=4,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=2,
    ),
    vision(
        "ConvNextForImageClassification",
        ("drop_path_rate",),
        patch_size=2,
        hidden_sizes=[4, 6],
        depths=[1, 1],
        num_stages=2,
        layer_scale_init_value=0.5,
    ),
    Model(
        "Wav2Vec2ForSequenceClassification (frozen feature encoder)",
        "transformers",
        wav2vec2,
        sounds,
        logits_loss,
        loss_inside=True,
    ),
    Model(
        "WhisperForAudioClassification",
        "transformers",
        partial(
            _build,
            config="WhisperConfig",
            head="WhisperForAudioClassification",
            drops=("dropout", "attention_dropout", "activation_dropout"),
            options={
                **TEXT,
                "num_mel_bins": 8,
                "d_model": WIDTH,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": WIDTH,
                "max_source_positions": 4,
                "classifier_proj_size": 6,
            },
        ),
        spectra,
        logits_loss,
        loss_inside=True,
    ),
]
