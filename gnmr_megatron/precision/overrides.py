"""Exceptions to the paths of all units: from settings, and from recipe files in megatron-core's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from gnmr_megatron.errors import ConfigError, did_you_mean
from gnmr_megatron.precision.catalog import PATHS, PathName

_ENGINE_TYPE = "transformer_engine_config_type"  # marks a payload that megatron-core itself reads


@dataclass(frozen=True)
class Override:
    """Paths of the units that a glob matches.

    Attributes:
        units: glob on the unit's id.
        low: low-cost path; None for that of the settings.
        recovery: high-fidelity path; None for that of the settings.
        fixed: the only path; the unit is then not recoverable.
        engine: payload of megatron-core's own form that a unit fixed on a `te_*` path is given.
        where: key or file and matcher, for messages.
    """

    units: str
    where: str
    low: PathName | None = None
    recovery: PathName | None = None
    fixed: PathName | None = None
    engine: Mapping[str, Any] | None = field(default=None, hash=False)


def parse_override(item: Mapping[str, Any], *, where: str) -> Override:
    """An override from its mapping.

    Raises:
        ConfigError: an unknown key or path, no glob, or keys that exclude each other.
    """
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"{where}: must be a mapping with `units` and `low`, `recovery` or `fixed`"
        )
    known = ("units", "low", "recovery", "fixed")
    for key in item:
        if key not in known:
            raise ConfigError(f"{where}: unknown key `{key}`{did_you_mean(str(key), known)}")
    if "units" not in item:
        raise ConfigError(f"{where}: needs `units`, a glob such as 'decoder.layers.0.*'")
    paths = {key: _path(value, f"{where}.{key}") for key, value in item.items() if key != "units"}
    if not paths or ("fixed" in paths and len(paths) > 1):
        raise ConfigError(f"{where}: needs `low` or `recovery` or both, or `fixed` alone")
    return Override(
        units=str(item["units"]),
        where=where,
        low=paths.get("low"),
        recovery=paths.get("recovery"),
        fixed=paths.get("fixed"),
    )


def overrides_of_recipe(path: str) -> list[Override]:
    """The enabled matchers of a recipe file, in their order.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"precision.recipe: {path} cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"precision.recipe: {path} is not YAML: {' '.join(str(error).split())}"
        ) from error
    sections = content if isinstance(content, dict) else {}
    configs, matchers = sections.get("configs"), sections.get("matchers")
    if not isinstance(configs, dict) or not isinstance(matchers, dict):
        raise ConfigError(
            f"precision.recipe: {path} needs `configs:` and `matchers:`, two mappings"
        )
    overrides = []
    for name, matcher in matchers.items():
        where = f"{path}: matcher `{name}`"
        if not isinstance(matcher, dict):
            raise ConfigError(f"{where} must be a mapping")
        if not matcher.get("enabled", False):  # megatron-core's default, too
            continue
        if matcher.get("type") != "glob":
            raise ConfigError(
                f"{where}: type `{matcher.get('type')}` is not known; it must be `glob`"
            )
        key = matcher.get("config")
        if not isinstance(key, str) or key not in configs:
            names = [str(name) for name in configs]
            raise ConfigError(f"{where}: no config `{key}`{did_you_mean(str(key), names)}")
        overrides.append(_matcher_override(matcher, configs[key], f"{path}: config `{key}`", where))
    return overrides


def _matcher_override(
    matcher: Mapping[str, Any], payload: Any, config_where: str, where: str
) -> Override:
    if "pattern" not in matcher:
        raise ConfigError(f"{where}: needs `pattern`, a glob")
    if not isinstance(payload, Mapping) or "units" in payload:
        raise ConfigError(
            f"{config_where}: must be `{{low: PATH, recovery: PATH}}`, `{{fixed: PATH}}`, or in megatron-core's form"
        )
    if _ENGINE_TYPE in payload:
        fixed = _engine_path(payload, config_where)
        return Override(units=str(matcher["pattern"]), where=where, fixed=fixed, engine=payload)
    return parse_override({**payload, "units": matcher["pattern"]}, where=config_where)


def _engine_path(payload: Mapping[str, Any], where: str) -> PathName:
    """The path whose recipe a payload in megatron-core's form asks for in training."""
    recipe = payload.get("training_recipe")
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"{where}: needs `training_recipe`, a mapping; empty for BF16")
    eight, four = (
        None if recipe.get(key) is None else str(recipe[key])
        for key in ("fp8_quantization_recipe", "fp4_quantization_recipe")
    )
    names = {
        (None, None): "te_bf16",
        ("tensorwise", None): "te_fp8_tensorwise",
        ("blockwise", None): "te_fp8_blockwise",
        ("mxfp8", None): "te_mxfp8",
        (None, "nvfp4"): "te_nvfp4",
    }
    if (eight, four) not in names:
        why = "delayed scaling has state over steps" if eight == "delayed" else "not known"
        raise ConfigError(
            f"{where}: recipe `{eight or four}` cannot be set for one module ({why}); possible: tensorwise, "
            "blockwise, mxfp8, nvfp4, or none for BF16"
        )
    return cast(PathName, names[eight, four])


def _path(value: Any, where: str) -> PathName:
    if not isinstance(value, str) or value not in PATHS:
        raise ConfigError(
            f"{where}: no path `{value}`{did_you_mean(str(value), list(PATHS), list_all=True)}"
        )
    return cast(PathName, value)
