# SPDX-License-Identifier: Apache-2.0
"""Entry point of the plugin (group ``vllm.general_plugins``).

``register()`` is called once or more in every process of a server. It is cheap (no torch, no vLLM
import), idempotent and never raises: it only leaves notes for the moment the host imports the
modules that hold our hooks. Without ``method="dspark"`` the hooks pass everything through, and
``VLLM_DSPARK_ENABLED=0`` leaves not even those.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from vllm_dspark.late_binding import on_import

# The host configures the "vllm" logger; a child of it reports in the same format.
logger = logging.getLogger("vllm.dspark")

_registered = False


def register() -> None:
    """Install the plugin in this process. Never raises; a failure leaves the host as it is."""
    global _registered
    if _registered:
        return
    try:
        _register()
    except Exception:
        logger.exception(
            "vllm-dspark could not be registered; the host's own DSpark stays in place"
        )
    _registered = True


def _register() -> None:
    from vllm_dspark.config import ConfigError, Switches
    from vllm_dspark.cpu import host

    if host.interpreter_requested():
        # Not ours to switch off: without these the host's own sampling fails in the interpreter.
        on_import("triton.runtime.interpreter", _install_interpreter_fixes)
    try:
        if not Switches.from_env().enabled:
            return
    except ConfigError as error:
        # A typo in a switch must not silently run something else than was asked for.
        logger.error("vllm-dspark stays off: %s", error)
        return
    from vllm_dspark import compat

    on_import("vllm.engine.arg_utils", _wrap_engine_args)
    on_import("vllm.model_executor.models.registry", _register_models)
    on_import(compat.RUNNER, _install_engine)


def _install_interpreter_fixes(module: ModuleType) -> None:
    from vllm_dspark.cpu import interpreter

    interpreter.install()


def _register_models(module: ModuleType) -> None:
    from vllm_dspark.engine.registration import register_draft_models

    register_draft_models(module.ModelRegistry)


def _install_engine(module: ModuleType) -> None:
    from vllm_dspark.engine import install

    install.bind(module)


def _wrap_engine_args(module: ModuleType) -> None:
    """Validate our options in the process that the operator talks to."""
    engine_args = getattr(module, "EngineArgs", None)
    original = getattr(engine_args, "create_engine_config", None)
    if original is None or hasattr(original, "dspark_original"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(self, *args, **kwargs)
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method == "dspark":
            _prepare_server(vllm_config)
        return vllm_config

    create_engine_config.dspark_original = original  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config  # type: ignore[union-attr]


def _prepare_server(vllm_config: Any) -> None:
    """What a DSpark server needs before its workers start.

    Raises:
        ConfigError: an option of the plugin is wrong.
        MissingHookError: the host lacks a symbol and ``strict`` is set.
    """
    from vllm_dspark import compat, metrics_export
    from vllm_dspark.config import DSparkConfig

    config, speculative = DSparkConfig.from_vllm_config(vllm_config), vllm_config.speculative_config
    config.check_block(speculative.num_speculative_tokens)
    config.check_drafting(probabilistic=speculative.draft_sample_method != "greedy")
    compat.usable(strict=config.strict)
    if config.metrics:
        metrics_export.prepare_parent()
        metrics_export.install_exporter()
