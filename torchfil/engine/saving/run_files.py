"""Writing a run: run files, reports, the average over several runs as one file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchfil.attacks.base import AttackResult
from torchfil.attacks.comparison import BoundComparison
from torchfil.engine.reading import LeakageReading
from torchfil.engine.saving.attribute_table import AttributeGroups, AttributeScales
from torchfil.engine.saving.build import Labels, build_saved_run
from torchfil.engine.saving.exposed_words import TokenTexts
from torchfil.engine.saving.merged import as_merged, epsilon_of_all
from torchfil.engine.saving.run_view import RunView
from torchfil.planning.equalising import Equalised
from torchfil.report.run_file import save
from torchfil.report.saved_run import SavedRun

__all__ = ["RunFiles"]


class RunFiles(LeakageReading):
    """The part of the engine that writes: run files and reports."""

    def save_run(
        self,
        path: str | os.PathLike[str],
        *,
        delta: float,
        title: str | None = None,
        attribute_names: Sequence[str] | None = None,
        attribute_units: Sequence[str] | None = None,
        attribute_scales: AttributeScales | None = None,
        attribute_groups: AttributeGroups | None = None,
        unit_of_inputs: str = "",
        input_range: tuple[float, float] | None = None,
        groups: Mapping[str, Labels] | None = None,
        pictures: int = 8,
        texts: TokenTexts | None = None,
        attacks: Sequence[AttackResult | BoundComparison] = (),
        hash_data: bool = True,
        equalised: Equalised | None = None,
    ) -> Path:
        """Write what is known about the run into one file, for ``torchfil report``, ``gate`` and ``inspect``.

        The file is safe to load, holds neither model nor data (except pictures and texts), replaces an older one only
        when complete, and is readable by its owner only. Its content is **confidential**. The run can continue
        afterwards. With several processes rank 0 writes it, and the others return the path at once.

        Args:
            path: The file; its suffix is .fil by convention.
            delta: δ for ε and for the examples' own ε.
            title: The report's title; None: the model's name and the number of examples.
            attribute_names: One per private coordinate, in order; needs ``track=("diagonal",)``.
            attribute_units: One per private coordinate, e.g. "years".
            attribute_scales: {attribute: (unit, scale) or (unit, scale, offset)} of attributes that were scaled for
                training: the attribute is scale · input + offset in that unit. ``{"age": ("years", 14.2, 51.0)}``
                reports errors in years instead of standard deviations.
            attribute_groups: {attribute: its levels' names}: combines the columns of a one-hot attribute; its error is
                that of a guess of all levels.
            unit_of_inputs: The unit of all coordinates, e.g. "grey value, 0 to 1".
            input_range: The lowest and the highest possible value of every private coordinate, known without looking at
                the data; the report then compares with a blind guess and with the bound from ε.
            groups: {grouping: one label per example, in the order of the data set, or a dict by id}.
            pictures: How many of the most and of the least exposed examples to keep as pictures, with their PLIS, if
                inputs are images of 1 or 3 channels; 0: none.
            texts: Every example's words, in the order of the data set, one for each position of the private embedding;
                or a tokenizer with ``decode``, or a function from a list with one token id to its string. The report
                shows the 20 most exposed examples, each token with its FIL and PLIS; needs ``track=("diagonal",)``.
                They are private data.
            attacks: Results of attacks on the run (measure "mse"); each is compared with the run's bounds, unless it
                comes from :func:`torchfil.compare_with_bounds`.
            hash_data: Whether to read the whole data set for its checksum. The spread of the data, which gives the
                error of a blind guess, is read from up to 65,536 examples; without ``hash_data`` from up to 2,048.
            equalised: The result of :func:`torchfil.equalise` with this ``engine``: the report then shows what each
                round did, and how groups compared before.
        """
        run = self._built(
            self._view(delta),
            title=title,
            attribute_names=attribute_names,
            attribute_units=attribute_units,
            attribute_scales=attribute_scales,
            attribute_groups=attribute_groups,
            unit_of_inputs=unit_of_inputs,
            input_range=input_range,
            groups=groups,
            pictures=pictures,
            texts=texts,
            attacks=attacks,
            hash_data=hash_data,
            equalised=equalised,
        )
        return Path(path) if run is None else save(run, path)

    def report(
        self, directory: str | os.PathLike[str], *, delta: float, redacted: bool = False, **options: Any
    ) -> Path:
        """Write the run's report into a folder and return the path of its page; with several processes, as rank 0.

        Args:
            directory: The folder.
            delta: δ for ε and for the examples' own ε.
            redacted: Whether to leave out everything about single examples; see :func:`torchfil.report.write_report`.
            **options: Options of :meth:`save_run`; ``min_group`` and ``policy`` of ``write_report``.
        """
        from torchfil.report.writer import PAGE, write_report

        writing = {name: options.pop(name) for name in ("min_group", "policy") if name in options}
        run = self._built(self._view(delta), **options)
        return Path(directory) / PAGE if run is None else write_report(run, directory, redacted=redacted, **writing)

    @classmethod
    def save_merged(
        cls, engines: Sequence[RunFiles], path: str | os.PathLike[str], *, delta: float, **options: Any
    ) -> Path:
        """Save the average over repeated runs (:meth:`merge`) as one run; the report says how many there were.

        The numbers are about one release, on average over runs, with errors from the spread between runs. ε is that of
        one run; the file also has the ε of all runs together, in case you release more than one.

        Args:
            engines: At least two repetitions with the same settings on the same data.
            path: The file.
            delta: δ of ε.
            **options: Options of :meth:`save_run`; pictures come from the first run.
        """
        if len(engines) < 2:
            raise ValueError(f"save_merged got {len(engines)} engines; use save_run for a single run")
        first = engines[0]
        kinds = [engine._training.optimizer.noise.kind for engine in engines]
        noise = "seeded" if "seeded" in kinds else kinds[0]
        run = first._built(replace(first._view(delta), leakage=cls.merge(engines), noise=noise), **options)
        if run is None:
            return Path(path)
        together = epsilon_of_all(first.accountant, len(engines), delta)
        return save(as_merged(run, len(engines), together), path)

    @property
    def _writes(self) -> bool:
        """Whether this process writes files."""
        ranks = self._training.run.ranks
        return ranks is None or ranks.rank == 0

    def _built(self, view: RunView, **options: Any) -> SavedRun | None:
        """The run as it is saved; None if another process writes it."""
        with self._training.replica.gathered():  # pictures are shown with their PLIS
            return build_saved_run(view, **options) if self._writes else None

    def _view(self, delta: float) -> RunView:
        """The run so far, for saving."""
        training = self._training
        run, looks, optimizer = training.run, training.looks, training.optimizer
        parts = run.options.accounting.accumulation_steps * (1 if run.ranks is None else run.ranks.size)
        mean = optimizer.loss_reduction == "mean"

        # everything that saving needs, so that it does not depend on engines
        return RunView(
            leakage=run.leakage,
            timeline=run.timeline,
            module=training.replica.live,
            dataset=looks.dataset,
            collate_fn=looks.collate_fn,
            options=run.options,
            noise_multiplier=float(optimizer.noise_multiplier),
            max_grad_norm=float(optimizer.max_grad_norm),
            expected_batch_size=float(optimizer.expected_batch_size * parts) if mean else None,
            num_probes=run.pace.num_probes,
            loss=run.loss.name if run.loss is not None else None,
            generator=run.generator,
            accountant=self.accountant.mechanism(),
            releases=self.accountant.history,
            delta=delta,
            individual_epsilon=self.get_individual_epsilon(delta=delta).value,
            epsilon=float(self.get_epsilon(delta)),
            rdp_mse_bound=self.get_rdp_mse_bound,
            plis=partial(looks.plis, optimizer=optimizer, private=True) if run.loss is not None else None,
            examples=looks.examples if looks.dataset is not None else None,
            clip_weights=self.clip_weights,
            noise_choice=self._choice,
            noise=optimizer.noise.kind,
        )
