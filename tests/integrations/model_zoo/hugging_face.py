"""Hugging Face's models from small configurations, each with a mask and padding.

Parts of them, and LoRA by peft.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .model import (
    CLASSES,
    LENGTH,
    WORDS,
    Model,
    causal_loss,
    logits_loss,
    seeded,
    signals,
    texts,
    token_loss,
)

W = 8  # the width of everything
TEXT: dict[str, Any] = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0}
BODY = {"hidden_size": W, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": W}
ENCODER = {**TEXT, **BODY, "max_position_embeddings": 12}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
DECODER = {**ENCODER, **ENDS, "num_key_value_heads": 1, "head_dim": 4}
GPT2 = {**TEXT, **ENDS, "n_embd": W, "n_layer": 1, "n_head": 2, "n_positions": 12}
T5 = {
    **TEXT,
    "d_model": W,
    "d_kv": 4,
    "d_ff": W,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
T5 |= {"relative_attention_num_buckets": 4, "eos_token_id": 2, "feed_forward_proj": "gated-gelu"}
SIDES = {
    f"{s}_{k}": n
    for s in ("encoder", "decoder")
    for k, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", W))
}
BART = {
    **TEXT,
    **ENDS,
    **SIDES,
    "d_model": W,
    "max_position_embeddings": 12,
    "decoder_start_token_id": 0,
}
WHISPER = {
    **TEXT,
    **SIDES,
    "num_mel_bins": 8,
    "d_model": W,
    "max_source_positions": 4,
    "classifier_proj_size": 6,
}
WAV2VEC2 = {
    **ENCODER,
    "conv_dim": [4, 4],
    "conv_kernel": [4, 3],
    "conv_stride": [3, 2],
    "num_feat_extract_layers": 2,
}
WAV2VEC2 |= {
    "num_conv_pos_embeddings": 3,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 6,
}
WAV2VEC2 |= {
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}
DISTIL = {**ENCODER, "dim": W, "n_layers": 1, "n_heads": 2, "hidden_dim": W}
DEBERTA = {
    **ENCODER,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 4,
}
DEBERTA |= {
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pooler_hidden_size": W,
    "type_vocab_size": 0,
}
IMAGE = {"num_labels": CLASSES, "num_channels": 3, "image_size": 8}
SWIN = {
    **IMAGE,
    "patch_size": 2,
    "embed_dim": 4,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 2,
}
CONVNEXT = {**IMAGE, "patch_size": 2, "hidden_sizes": [4, 6], "depths": [1, 1], "num_stages": 2}

# The options by which a configuration is told the probability of dropout.
BERT_DROPS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2_DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DISTIL_DROPS = ("dropout", "attention_dropout", "seq_classif_dropout")
WAV2VEC2_DROPS = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout")
DROPS = ("attention_dropout",)


def built(dropout: float, given: tuple[str, dict[str, Any], tuple[str, ...]]) -> Any:
    """The model of that name from its configuration."""
    import transformers

    head, options, drops = given

    config = getattr(transformers, re.sub("(For|LMHead).*", "Config", head))
    return getattr(transformers, head)(config(**options, **dict.fromkeys(drops, dropout)))


def adapted(dropout: float, targets: list[str], task: str, given: Any, **more: Any) -> nn.Module:
    """A model with LoRA of rank 2.

    The second factor, zero at first, is drawn at random, so that both are trained.
    """
    import peft

    config = peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=dropout, target_modules=targets, task_type=task, **more
    )
    model = peft.get_peft_model(built(dropout, given), config)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.3)
    return model


def partly(dropout: float, parts: str, given: Any) -> nn.Module:
    """The model with all else frozen than parameters whose name has this part."""
    model: nn.Module = built(dropout, given)
    for name, value in model.named_parameters():
        value.requires_grad_(parts in name)
    return model


def frozen_features(dropout: float, given: Any) -> nn.Module:
    """Wav2Vec 2 as it is fine-tuned."""
    model = built(dropout, given)
    model.freeze_feature_encoder()
    return model


def pairs() -> list[dict[str, Tensor]]:
    """Texts and their translations, with the decoder's input as ``DataCollatorForSeq2Seq`` makes
    it.
    """
    source, examples = seeded(1), []
    for i, example in enumerate(texts()):
        words = torch.randint(3, WORDS, (LENGTH - 1,), generator=source)
        words[LENGTH - 1 - i % 2 :] = -100
        shifted = torch.cat([words.new_zeros(1), words[:-1]]).clamp(min=0)
        examples.append({**example, "decoder_input_ids": shifted, "labels": words})
    return examples


def unpadded() -> list[dict[str, Tensor]]:
    """Texts of their own lengths."""
    return [
        {
            key: value[: int(example["attention_mask"].sum())] if value.ndim else value
            for key, value in example.items()
        }
        for example in texts()
    ]


def to_the_longest(examples: list[dict[str, Tensor]]) -> Any:
    """A batch as ``DataCollatorWithPadding`` makes it."""
    from transformers import BatchEncoding

    columns = {key: [example[key] for example in examples] for key in examples[0]}
    return BatchEncoding(
        {
            key: pad_sequence(column, True) if column[0].ndim else torch.stack(column)
            for key, column in columns.items()
        }
    )


def ending() -> list[dict[str, Tensor]]:
    """Texts that end in the same word, each once, as T5's classifier wants it."""
    examples = texts()
    for example in examples:
        example["input_ids"][int(example["attention_mask"].sum()) - 1] = 2
    return examples


def hidden_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the logits, and a penalty of the first layer's inputs and outputs."""
    return logits_loss(outputs, labels) + 0.1 * sum(
        state.square().mean() for state in outputs.hidden_states
    )


TASKS: dict[str, tuple[Any, Any]] = {
    "CausalLM": (partial(texts, "words"), causal_loss),
    "LMHead": (partial(texts, "words"), causal_loss),
    "MaskedLM": (partial(texts, "words"), token_loss),
    "TokenClassification": (partial(texts, "tokens"), token_loss),
    "ConditionalGeneration": (pairs, token_loss),
    "ImageClassification": (partial(signals, "pixel_values", 3, 8, 8), logits_loss),
    "Wav2Vec2": (partial(signals, "input_values", 40), logits_loss),
    "Whisper": (partial(signals, "input_features", 8, 8), logits_loss),
    "T5ForSequence": (ending, logits_loss),
    "SequenceClassification": (texts, logits_loss),
}


def model(
    name: str,
    options: Any,
    private: Any = (),
    drops: Any = BERT_DROPS,
    *,
    head: Any = None,
    build: Any = built,
    **more: Any,
) -> Model:
    """A line of the table.

    Args:
        name: It begins with the class, unless ``head`` tells it.
        options: Of the configuration.
        private: The submodules whose outputs are private.
        drops: The options that are the probability of dropout.
        head: The class.
        build: A function of the probability and of what ``built`` is given.
        **more: Other fields of the line.
    """
    head = head or re.split(r",| \(", name)[0]
    data, loss = next(task for part, task in TASKS.items() if part in head)
    fields = {"data": data, "loss": loss, "loss_inside": True, **more}
    return Model(name, partial(build, given=(head, options, drops)), private=private, **fields)


def lora(
    name: str,
    head: str,
    options: Any,
    private: str,
    drops: Any,
    targets: list[str],
    task: str,
    **more: Any,
) -> Model:
    """A line of the table: a model with LoRA."""
    build = partial(adapted, targets=targets, task=task, **more)
    return model(name, options, f"base_model.model.{private}", drops, head=head, build=build)


TABLE, TOKENS, CLASSIFIER = (
    "embeddings.word_embeddings",
    "model.embed_tokens",
    "BertForSequenceClassification",
)
BERT, SIDES_OF_T5 = f"bert.{TABLE}", ("encoder.embed_tokens", "decoder.embed_tokens")
HIDDEN, OUTSIDE = (
    {**ENCODER, "output_hidden_states": True},
    {"loss_inside": False, "criterion_needed": True},
)
ALBERT = {**ENCODER, "embedding_size": 6, "num_hidden_layers": 2}
OPT = {**DECODER, "ffn_dim": W, "word_embed_proj_dim": W}
PHI, PHI_DROPS = {**DECODER, "partial_rotary_factor": 0.5}, ("resid_pdrop", "embd_pdrop", *DROPS)
T5_DROPS, FAN = (
    ("dropout_rate", "classifier_dropout"),
    {"task": "CAUSAL_LM", "fan_in_fan_out": True},
)
WAV2VEC2_NAME = "Wav2Vec2ForSequenceClassification (frozen feature encoder)"
MODELS = [
    model(CLASSIFIER, ENCODER, BERT),
    model(f"{CLASSIFIER}, token_type_ids", ENCODER, BERT, data=partial(texts, segments=True)),
    model(
        f"{CLASSIFIER}, padded to each batch's longest",
        ENCODER,
        BERT,
        data=unpadded,
        collate=to_the_longest,
    ),
    model(f"{CLASSIFIER}, a loss on its hidden states", HIDDEN, BERT, loss=hidden_loss, **OUTSIDE),
    model("BertForTokenClassification", ENCODER, BERT),
    model("BertForMaskedLM (tied)", ENCODER, BERT),
    model("RobertaForSequenceClassification", ENCODER, f"roberta.{TABLE}"),
    model("DistilBertForSequenceClassification", DISTIL, f"distilbert.{TABLE}", DISTIL_DROPS),
    model("ElectraForSequenceClassification", {**ENCODER, "embedding_size": 6}, f"electra.{TABLE}"),
    model(
        "AlbertForSequenceClassification",
        ALBERT,
        f"albert.{TABLE}",
        (*BERT_DROPS, "classifier_dropout_prob"),
    ),
    model(
        "DebertaV2ForSequenceClassification",
        DEBERTA,
        f"deberta.{TABLE}",
        (*BERT_DROPS, "pooler_dropout"),
    ),
    model("GPT2LMHeadModel (tied)", GPT2, "transformer.wte", GPT2_DROPS),
    model("GPT2ForSequenceClassification", GPT2, "transformer.wte", GPT2_DROPS),
    model("LlamaForCausalLM", DECODER, TOKENS, DROPS),
    model("LlamaForSequenceClassification", DECODER, TOKENS, DROPS),
    model("MistralForCausalLM", {**DECODER, "sliding_window": 4}, TOKENS, DROPS),
    *(model(f"{name}ForCausalLM", DECODER, TOKENS, DROPS) for name in ("Qwen2", "Qwen3", "Gemma")),
    model("OPTForCausalLM", OPT, "model.decoder.embed_tokens", ("dropout", "attention_dropout")),
    model(
        "GPTNeoXForCausalLM", DECODER, "gpt_neox.embed_in", ("hidden_dropout", "attention_dropout")
    ),
    model("PhiForCausalLM", PHI, TOKENS, PHI_DROPS),
    model("T5ForConditionalGeneration", T5, SIDES_OF_T5, ("dropout_rate",)),
    model(
        "BartForConditionalGeneration",
        BART,
        tuple(f"model.{side}" for side in SIDES_OF_T5),
        ("dropout",),
    ),
    model(
        "T5ForSequenceClassification",
        T5,
        tuple(f"transformer.{side}" for side in SIDES_OF_T5),
        T5_DROPS,
    ),
    *(
        model(f"{name}ForImageClassification", {**IMAGE, **BODY, "patch_size": 4})
        for name in ("ViT", "DeiT")
    ),
    model("SwinForImageClassification", SWIN, drops=("drop_path_rate", *BERT_DROPS)),
    model(
        "ConvNextForImageClassification",
        {**CONVNEXT, "layer_scale_init_value": 0.5},
        drops=("drop_path_rate",),
    ),
    model(WAV2VEC2_NAME, WAV2VEC2, drops=WAV2VEC2_DROPS, build=frozen_features),
    model(
        "WhisperForAudioClassification",
        WHISPER,
        drops=("dropout", "attention_dropout", "activation_dropout"),
    ),
    lora(
        "BERT with LoRA (peft)",
        CLASSIFIER,
        ENCODER,
        BERT,
        BERT_DROPS,
        ["query", "value"],
        "SEQ_CLS",
    ),
    lora(
        "GPT-2 with LoRA (peft, Conv1D)",
        "GPT2LMHeadModel",
        GPT2,
        "transformer.wte",
        GPT2_DROPS,
        ["c_attn"],
        **FAN,
    ),
    lora(
        "Llama with LoRA (peft)",
        "LlamaForCausalLM",
        DECODER,
        TOKENS,
        DROPS,
        ["q_proj", "v_proj"],
        "CAUSAL_LM",
    ),
    model(
        "BERT, head only", ENCODER, BERT, head=CLASSIFIER, build=partial(partly, parts="classifier")
    ),
    model(
        "BERT, biases only (BitFit)",
        ENCODER,
        BERT,
        head=CLASSIFIER,
        build=partial(partly, parts="bias"),
    ),
]
