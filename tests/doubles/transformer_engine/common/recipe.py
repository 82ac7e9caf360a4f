import enum


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    def __init__(self, fp8_format=Format.HYBRID, **_):
        self.fp8_format = fp8_format


class DelayedScaling(Recipe):
    pass


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass


class NVFP4BlockScaling(Recipe):
    pass
