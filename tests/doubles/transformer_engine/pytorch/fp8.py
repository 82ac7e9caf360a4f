from transformer_engine.pytorch.quantization import FP8GlobalStateManager, fp8_autocast

__all__ = ["FP8GlobalStateManager", "fp8_autocast"]
