"""What keeps stored weights and a module from fitting, as one error that lists everything."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from torch.nn import Module

from broker.errors import BindError

_NAMES_IN_SENTENCE = 20
"""Of each list; the error's fields hold all of them."""


@dataclass
class Misfits:
    """Everything that does not fit.

    Attributes:
        missing: parameters that are not stored, each with the other names of the same object.
        missing_buffers: persistent buffers that are not stored.
        mismatched: name → {"module": …, "stored": …} for another dtype or shape.
        ties: stored names of one tied parameter whose bytes differ.
        on_meta: what is to keep its own values and has none: buffers that are not stored, and
            whatever `names` gives nothing to.
        no_place: what `names` gives a stored tensor to and the module does not have.
        unexpected: stored names that the module has no place for.
    """

    missing: list[list[str]] = field(default_factory=list)
    missing_buffers: list[str] = field(default_factory=list)
    mismatched: dict[str, dict[str, str]] = field(default_factory=dict)
    ties: list[list[str]] = field(default_factory=list)
    on_meta: list[str] = field(default_factory=list)
    no_place: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def error(self, module: Module, stored: Container[str]) -> BindError:
        """The error that says all of it, and which prefix would help if one would.

        Args:
            stored: every stored name.
        """
        added, lacking = self._prefixes(stored)
        advice = self._advice()
        if added:
            advice = f"Every name is there behind {added!r}: bind with prefix={added!r}."
        elif lacking:
            path = lacking.rstrip(".")
            advice = (
                f"Every name is there without {lacking!r}: bind the submodule {path!r} instead."
            )
        what = "; ".join(part for part in self._parts() if part)
        return BindError(
            f"these weights do not fit {type(module).__name__}, which was left as it was: {what}. "
            f"{advice}",
            reason=self._reason(),
            missing=[tied[0] for tied in self.missing] + self.missing_buffers,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
            on_meta=self.on_meta,
            tie_conflicts=self.ties,
            no_place=self.no_place,
            prefix=added or lacking,
        )

    def _parts(self) -> list[str]:
        missing = [" = ".join(tied) for tied in self.missing] + self.missing_buffers
        mismatched = [
            f"{name} (module: {what['module']}, stored: {what['stored']})"
            for name, what in self.mismatched.items()
        ]
        return [
            _listed("named in `names` and not in the module", self.no_place),
            _listed("missing from the stored weights", missing),
            _listed("without a place in the module", self.unexpected),
            _listed("of another dtype or shape", mismatched),
            _listed(
                "tied in the module but stored with different bytes", map(" and ".join, self.ties)
            ),
            _listed("to keep their own values and without any (on meta)", self.on_meta),
        ]

    def _advice(self) -> str:
        if self.no_place:
            return "`names` gives stored names by the module's: named_parameters() lists those."
        if self.missing or self.missing_buffers:
            return "Check that the module was built from this checkpoint's own config."
        if self.mismatched:
            return "Build the module with the stored shapes and dtypes; binding never casts."
        if self.ties:
            return "Build the module with the tie switched off (tie_word_embeddings) or repair one."
        if self.on_meta:
            return (
                "Build the module within parameters_on_meta(), which keeps buffers real; where "
                "`names` is given, it has to have every parameter on meta."
            )
        return "Name what may stay unused with ignore=[...] (shell patterns)."

    def _reason(self) -> str:
        """One word for programs: the gravest of the misfits."""
        if self.no_place:
            return "no_place"
        if self.missing:
            return "missing_parameter"
        if self.missing_buffers:
            return "missing_buffer"
        if self.mismatched:
            return "shape_mismatch" if self._shapes_differ() else "dtype_mismatch"
        if self.ties:
            return "tie_conflict"
        return "on_meta" if self.on_meta else "unexpected_tensor"

    def _shapes_differ(self) -> bool:
        return any(
            what["module"].partition(" ")[2] != what["stored"].partition(" ")[2]
            for what in self.mismatched.values()
        )

    def _prefixes(self, stored: Container[str]) -> tuple[str, str]:
        """A prefix that the stored names have and the module's lack, or the other way round.

        Only one with which everything missing would be there counts.
        """
        missing = self.missing + [[name] for name in self.missing_buffers]
        if not missing:
            return "", ""
        for candidate in _longer(missing[0], self.unexpected):
            if all(any(candidate + name in stored for name in tied) for tied in missing):
                return candidate, ""
        for candidate in _heads(missing[0]):
            if all(any(_without(candidate, name) in stored for name in tied) for tied in missing):
                return "", candidate
        return "", ""


def _longer(names: Iterable[str], others: Iterable[str]) -> Iterable[str]:
    """What stands before one of the names in longer ones."""
    endings = tuple("." + name for name in names)
    for other in others:
        for ending in endings:
            if other.endswith(ending):
                yield other[: len(other) - len(ending) + 1]


def _heads(names: Iterable[str]) -> Iterable[str]:
    """What stands before and including each dot."""
    for name in names:
        at = name.find(".")
        while at >= 0:
            yield name[: at + 1]
            at = name.find(".", at + 1)


def _without(prefix: str, name: str) -> str | None:
    return name[len(prefix) :] if name.startswith(prefix) else None


def _listed(what: str, names: Iterable[str]) -> str:
    every = list(names)
    if not every:
        return ""
    shown = ", ".join(every[:_NAMES_IN_SENTENCE])
    more = len(every) - _NAMES_IN_SENTENCE
    return f"{len(every)} {what}: {shown}" + (f" and {more} more" if more > 0 else "")
