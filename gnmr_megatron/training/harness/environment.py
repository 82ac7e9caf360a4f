"""What has to be so before the harness's libraries are loaded; no torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys

from gnmr_megatron.errors import ConfigError


def prepare_environment() -> None:
    """Keep the harness's libraries from the network, and from writing what is no result.

    Raises:
        ConfigError: they are not installed.
    """
    missing = [name for name in ("lm_eval", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} cannot be imported; install lm-evaluation-harness with: "
            "pip install 'gnmr-megatron[evaluation]'"
        )
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        os.environ |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
