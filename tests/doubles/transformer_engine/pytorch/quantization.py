from contextlib import contextmanager


class FP8GlobalStateManager:
    _recipe = None  # of the innermost autocast; None where it is off

    @classmethod
    def is_fp8_enabled(cls):
        return cls._recipe is not None

    @classmethod
    def get_fp8_recipe(cls):
        return cls._recipe

    @classmethod
    def is_fp8_available(cls):
        return True, ""

    is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available


def check_recipe_support(recipe):
    del recipe


@contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, **_):
    before = FP8GlobalStateManager._recipe
    FP8GlobalStateManager._recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager._recipe = before
