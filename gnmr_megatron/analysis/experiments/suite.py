"""A suite of runs as its YAML file says: what is prepared, arms, sizes, seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gnmr_megatron.errors import ConfigError, did_you_mean

SMOKE = "smoke"


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Text that is made into a dataset before any run.

    Attributes:
        inputs: files and folders, as `prepare-data` takes them.
        tokenizer_from: dataset whose tokenizer it shares.
    """

    inputs: tuple[str, ...]
    tokenizer_from: str


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of a suite, to be run with each seed.

    Attributes:
        name: of the arm.
        settings: dotted keys of a run.
        budget_of: arm whose recovered units of each step are this one's budget; for controls that are to recover as
            much as it does.
        calibrated_on: arm on whose run, that of the seed after, alpha, beta, delta, lock and warm-up are calibrated.
        target_exceedance: rate of unit-steps over a threshold that calibration is to find.
    """

    name: str
    settings: Mapping[str, Any]
    budget_of: str | None = None
    calibrated_on: str | None = None
    target_exceedance: float = 0.002


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the runs of a suite are.

    Attributes:
        base: configuration file of all runs.
        seeds: one run of each arm for each.
        settings: dotted keys on top of the base; arms may change them again.
        arms: names of the arms to run; all where it is empty.
        preparation: dotted keys on top of those of each preparation, by its name.
        prepares: whether the suite's datasets and preparation are made; where not, settings name others.
    """

    base: Path
    seeds: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    preparation: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prepares: bool = True


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A matrix of runs.

    `{output}` in a value of a setting is the folder that all of the suite's runs and datasets lie in.

    Attributes:
        name: of the file.
        question: what it asks, in a sentence.
        settings: dotted keys of all runs.
        arms: by name.
        sizes: by name; `smoke` and `small` run on a laptop.
        low: arm of the low path, from which the gap to close is counted.
        high: arm of the high path, up to which it is counted.
        oracle: arm with the best choice at the same budget, or None.
        subject: arm that the question is about, whose detection of faults stands for the suite, or None.
        datasets: text to prepare first, by name of the dataset.
        preparation: dotted keys of the runs that come before all arms, once, by name; on top of the size's base.
    """

    name: str
    question: str
    settings: Mapping[str, Any]
    arms: Mapping[str, Arm]
    sizes: Mapping[str, Size]
    low: str
    high: str
    oracle: str | None = None
    subject: str | None = None
    datasets: Mapping[str, TextSource] = field(default_factory=dict)
    preparation: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Suite:
        """A suite from its file.

        Raises:
            ConfigError: it is missing, no YAML, or a key is missing, unknown or names an arm that is not there.
        """
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
        plain = _fields(content, cls, where=str(path), given={"name"})
        arms = {
            name: _arm(name, arm, f"{path}: arms.{name}")
            for name, arm in _mapping(plain["arms"], f"{path}: arms").items()
        }
        sizes = {
            name: _size(path, name, size)
            for name, size in _mapping(plain["sizes"], f"{path}: sizes").items()
        }
        datasets = {
            name: _text_source(text, f"{path}: datasets.{name}")
            for name, text in _mapping(plain.get("datasets", {}), f"{path}: datasets").items()
        }
        preparation = _settings_by_name(plain.get("preparation", {}), f"{path}: preparation")
        _mapping(plain["settings"], f"{path}: settings")
        _check_texts(plain, ("question", "low", "high", "oracle", "subject"), str(path))
        suite = cls(
            **{
                **plain, "name": path.stem, "arms": arms, "sizes": sizes, "datasets": datasets,
                "preparation": preparation,
            }
        )  # fmt: skip
        suite._check(path)
        return suite

    def _check(self, path: Path) -> None:
        self._check_arms(path)
        for name in sorted(self.datasets.keys() & self.preparation.keys()):
            raise ConfigError(f"{path}: `{name}` names a dataset and a preparation, so one folder")
        known = list(self.preparation)
        for size_name, size in self.sizes.items():
            for name in size.preparation.keys() - self.preparation.keys():
                raise ConfigError(
                    f"{path}: sizes.{size_name}.preparation: no preparation `{name}`"
                    f"{did_you_mean(name, known, list_all=True)}"
                )

    def _check_arms(self, path: Path) -> None:
        named = {"low": self.low, "high": self.high}
        named.update(
            {
                key: arm
                for key, arm in (("oracle", self.oracle), ("subject", self.subject))
                if arm is not None
            }
        )
        for arm in self.arms.values():
            if arm.budget_of is not None:
                named[f"arms.{arm.name}.budget_of"] = arm.budget_of
            if arm.calibrated_on is not None:
                named[f"arms.{arm.name}.calibrated_on"] = arm.calibrated_on
        for size_name, size in self.sizes.items():
            named.update(
                {f"sizes.{size_name}.arms[{index}]": arm for index, arm in enumerate(size.arms)}
            )
        for key, arm_name in named.items():
            if arm_name not in self.arms:
                raise ConfigError(
                    f"{path}: {key}: no arm `{arm_name}`{did_you_mean(arm_name, list(self.arms))}"
                )
        for arm in self.arms.values():
            if arm.budget_of is not None and self.arms[arm.budget_of].budget_of is not None:
                raise ConfigError(
                    f"{path}: arms.{arm.name}.budget_of: {arm.budget_of} takes its budget from another arm itself"
                )
            if arm.calibrated_on is not None and self.arms[arm.calibrated_on].calibrated_on:
                raise ConfigError(
                    f"{path}: arms.{arm.name}.calibrated_on: {arm.calibrated_on} is calibrated itself"
                )

    def size(self, name: str) -> Size:
        """The size of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.sizes:
            raise ConfigError(
                f"size: {self.name} has no `{name}`{did_you_mean(name, list(self.sizes), list_all=True)}"
            )
        return self.sizes[name]


def find_suite(name: str, folder: Path) -> Suite:
    """The suite of a name in a folder of suites, or of a path.

    Raises:
        ConfigError: there is none; lists those that there are.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return Suite.read(path)
    known = sorted(item.stem for item in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"no experiment `{name}` in {folder}{did_you_mean(name, known, list_all=True)}"
            if known
            else f"{folder}: holds no experiments; run this from a clone, or give the path of a suite"
        )
    return Suite.read(folder / f"{name}.yaml")


def _arm(name: str, content: Any, where: str) -> Arm:
    plain = _fields(content, Arm, where=where, given={"name"})
    _mapping(plain["settings"], f"{where}.settings")
    _check_texts(plain, ("budget_of", "calibrated_on"), where)
    target = plain.get("target_exceedance", 0.5)
    if not isinstance(target, float) or not 0 < target < 1:
        raise ConfigError(f"{where}.target_exceedance: must be a number between 0 and 1")
    return Arm(name=name, **plain)


def _size(path: Path, name: str, content: Any) -> Size:
    where = f"{path}: sizes.{name}"
    plain = _fields(content, Size, where=where)
    _check_texts(plain, ("base",), where)
    seeds, arms = plain["seeds"], plain.get("arms", [])
    if (
        not isinstance(seeds, list)
        or not seeds
        or any(type(seed) is not int for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise ConfigError(f"{where}.seeds: must be a list of different whole numbers")
    if not isinstance(arms, list) or any(not isinstance(arm, str) for arm in arms):
        raise ConfigError(f"{where}.arms: must be a list of arms")
    prepares = plain.get("prepares", True)
    if not isinstance(prepares, bool):
        raise ConfigError(f"{where}.prepares: must be true or false")
    return Size(
        base=path.parent / plain["base"],
        seeds=tuple(seeds),
        settings=_mapping(plain.get("settings", {}), f"{where}.settings"),
        arms=tuple(arms),
        preparation=_settings_by_name(plain.get("preparation", {}), f"{where}.preparation"),
        prepares=prepares,
    )


def _text_source(content: Any, where: str) -> TextSource:
    plain = _fields(content, TextSource, where=where)
    if not isinstance(plain["inputs"], list) or not plain["inputs"]:
        raise ConfigError(f"{where}.inputs: must be a list of files and folders")
    return TextSource(
        inputs=tuple(map(str, plain["inputs"])), tokenizer_from=str(plain["tokenizer_from"])
    )


def _settings_by_name(content: Any, where: str) -> dict[str, dict[str, Any]]:
    return {
        name: _mapping(settings, f"{where}.{name}")
        for name, settings in _mapping(content, where).items()
    }


def _fields(
    content: Any, kind: type, *, where: str, given: set[str] | None = None
) -> dict[str, Any]:
    """The fields of a dataclass out of a mapping; unknown and missing ones are refused."""
    plain = _mapping(content, where)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in (given or set())}
    for key in plain:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key `{key}`{did_you_mean(str(key), list(fields))}")
    for name, item in fields.items():
        is_needed = (
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        )
        if is_needed and name not in plain:
            raise ConfigError(f"{where}: `{name}` is missing")
    return plain


def _check_texts(plain: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in keys:
        if plain.get(key) is not None and not isinstance(plain[key], str):
            raise ConfigError(f"{where}: {key}: must be text")


def _mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must hold `key: value` pairs")
    return content
