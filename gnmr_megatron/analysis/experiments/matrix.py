"""The runs of a suite: which there are, which are done, and taking the others."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import yaml

from gnmr_megatron.analysis.calibrate import calibrate
from gnmr_megatron.analysis.experiments.origin import check_origin, origin_as_comment, origins_of
from gnmr_megatron.analysis.experiments.planned_run import PlannedRun
from gnmr_megatron.analysis.experiments.suite import Size, Suite
from gnmr_megatron.analysis.recorded_run import RecordedRun
from gnmr_megatron.errors import ConfigError, GnmrError
from gnmr_megatron.observability.append_file import replace_file

MESSAGE_LINES = 6


def plan(suite: Suite, size: Size, output: Path, overrides: Mapping[str, Any]) -> list[PlannedRun]:
    """All runs of a suite's arms, those first that others need."""
    arms = [suite.arms[name] for name in size.arms] or list(suite.arms.values())
    names = {arm.name for arm in arms}
    for arm in arms:
        for needed in (arm.budget_of, arm.calibrated_on):
            if needed is not None and needed not in names:
                raise ConfigError(
                    f"experiment {suite.name}: arm {arm.name} needs {needed}, which this size leaves out"
                )

    def folder(arm: str | None, seed: int) -> Path | None:
        return None if arm is None else output / f"{arm}-s{seed}"

    # thresholds come from another seed where there is one: they are not to be fitted to their own run
    next_seed = dict(zip(size.seeds, [*size.seeds[1:], size.seeds[0]], strict=True))
    runs = [
        PlannedRun(
            arm=arm,
            seed=seed,
            folder=output / f"{arm.name}-s{seed}",
            base=size.base,
            settings={
                **suite.settings,
                **size.settings,
                **arm.settings,
                "seed": seed,
                **overrides,
            },
            budget_from=folder(arm.budget_of, seed),
            calibrated_on=folder(arm.calibrated_on, next_seed[seed]),
            prepared_by=tuple(output / name for name in suite.preparation if size.prepares),
            datasets=suite.datasets if size.prepares else {},
        )
        for arm in arms
        for seed in size.seeds
    ]
    for run in runs:
        budget = run.settings.get("gnmr.max_recovered")
        if run.calibrated_on is not None and not isinstance(budget, int | None):
            raise ConfigError(
                f"experiment {suite.name}: arm {run.arm.name}: gnmr.max_recovered must be a number where thresholds "
                "are calibrated"
            )
    return sorted(
        runs, key=lambda run: (run.budget_from is not None, run.calibrated_on is not None)
    )


def take(
    runs: Sequence[PlannedRun],
    *,
    at_once: int,
    tell: Callable[[PlannedRun, str], None],
    launch: Sequence[str] = (),
) -> list[str]:
    """Take all runs that are not done, several at a time.

    Args:
        runs: of a suite.
        at_once: how many at a time.
        tell: called with a run and `started`, `done`, `was done` or `failed`, in one thread.
        launch: command that starts `gnmr-megatron train` on many processes; by default it is started itself.

    Returns:
        A message for each run that failed; the others went on.

    Raises:
        ConfigError: a run was started with other settings, or from something else, before.
    """
    done = {run.folder for run in runs if run.is_done}
    origins = origins_of(runs)
    for run in runs:
        check_origin(run, origins[run.folder])
    for run in runs:
        if run.folder in done:
            tell(run, "was done")
    waiting = [run for run in runs if run.folder not in done]
    failures: list[str] = []
    environment = {**os.environ, "WANDB_SILENT": "true"} if launch else _environment(at_once)
    with ThreadPoolExecutor(at_once) as pool, _Processes(environment) as processes:
        going: dict[Future[str | None], PlannedRun] = {}
        while waiting or going:
            ready = [run for run in waiting if done.issuperset(run.needs)]
            for run in ready[: at_once - len(going)]:
                waiting.remove(run)
                tell(run, "started")
                take_it = partial(
                    _take_one, run, origins[run.folder], run.command(launch), processes
                )
                going[pool.submit(take_it)] = run
            if not going:
                failures += [
                    f"{run.folder.name}: needs {' and '.join(item.name for item in run.needs)}"
                    for run in waiting
                ]
                break
            finished, _ = wait(going, return_when=FIRST_COMPLETED)
            for future in finished:
                run = going.pop(future)
                problem = future.result()
                tell(run, "failed" if problem else "done")
                if problem:
                    failures.append(f"{run.folder.name}: {problem}")
                else:
                    done.add(run.folder)
    return failures


class _Processes:
    """The processes of runs; all are asked to save and end where the suite is ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._going: set[subprocess.Popen[bytes]] = set()
        self._is_ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):  # which a terminal sends to all
            return
        self._is_ending = True
        for process in list(self._going):
            process.terminate()

    def run(self, command: Sequence[str], log: IO[bytes]) -> int:
        """Exit code of a command."""
        with subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=self._environment
        ) as process:
            self._going.add(process)
            if self._is_ending:
                process.terminate()
            code = process.wait()
        self._going.discard(process)
        return code


def _take_one(
    run: PlannedRun,
    origin: Mapping[str, Any],
    command: Sequence[str],
    processes: _Processes,
) -> str | None:
    """Take a run in processes of its own; the end of its messages where it failed."""
    try:
        _write_sidecar(run, origin)
    except (GnmrError, OSError) as error:
        return str(error)
    log = run.folder.with_name(run.folder.name + ".log")
    with log.open("wb") as file:
        code = processes.run(command, file)
    if run.is_done:
        return None
    if code == 0:
        return "was stopped before its end; start the suite again to go on with it"
    with contextlib.suppress(OSError):
        lines = log.read_text().strip().splitlines()
        return f"exit code {code}; {log} ends:\n  " + "\n  ".join(lines[-MESSAGE_LINES:])
    return f"exit code {code}"


def _write_sidecar(run: PlannedRun, origin: Mapping[str, Any]) -> None:
    settings: dict[str, Any] = {}
    own = run.placed_settings | _learnt(run)
    for key, value in own.items():
        place = settings
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    head = origin_as_comment(origin)
    replace_file(run.sidecar, (head + yaml.safe_dump(settings, sort_keys=False)).encode())


def _learnt(run: PlannedRun) -> dict[str, Any]:
    """Settings that follow from other runs."""
    found: dict[str, Any] = {}
    if run.calibrated_on is not None:
        recorded = RecordedRun(run.calibrated_on)
        budget = run.settings.get("gnmr.max_recovered", recorded.starts[-1].max_recovered)
        result = calibrate(recorded, target=run.arm.target_exceedance, max_recovered=int(budget))
        found |= {f"gnmr.{key}": value for key, value in result.settings.items()}
    if run.budget_from is not None:
        found["gnmr.max_recovered"] = recovered_after_each_step(RecordedRun(run.budget_from))
    return found


def recovered_after_each_step(run: RecordedRun) -> dict[int, int]:
    """How many units were selected after each step: a budget for another run that is to recover as many."""
    matrix = run.matrix
    counts = matrix.selected.sum(axis=1)
    return {int(step): int(count) for step, count in zip(matrix.steps, counts, strict=True)}


def _environment(at_once: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // at_once)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "WANDB_SILENT": "true"}
