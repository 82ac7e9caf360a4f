"""Tables of small number formats, built value by value from the OCP specifications."""

import numpy as np

# (exponent bits, mantissa bits, bias); all other values follow
FLOATS = {
    "fp8_e4m3": (4, 3, 7),
    "fp8_e5m2": (5, 2, 15),
    "fp6_e3m2": (3, 2, 3),
    "fp6_e2m3": (2, 3, 1),
    "fp4_e2m1": (2, 1, 1),
}
INTEGERS = {"int8": 127, "int4": 7, "int3": 3, "int2": 1}


def finite_values(name):
    """{code: value} of all finite codes; -0.0 included."""
    if name in INTEGERS:
        return {code: float(code) for code in range(-INTEGERS[name], INTEGERS[name] + 1)}
    exponent_bits, mantissa_bits, bias = FLOATS[name]
    values = {}
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        exponent = (code >> mantissa_bits) % 2**exponent_bits
        fraction = code % 2**mantissa_bits
        if name == "fp8_e5m2" and exponent == 31:
            continue  # infinities and NaN, as in IEEE 754
        if name == "fp8_e4m3" and exponent == 15 and fraction == 7:
            continue  # NaN
        significand = fraction / 2**mantissa_bits
        if exponent:
            values[code] = sign * 2.0 ** (exponent - bias) * (1 + significand)
        else:
            values[code] = sign * 2.0 ** (1 - bias) * significand
    return values


def magnitudes(name):
    """Sorted non-negative values."""
    return np.array(sorted({value for value in finite_values(name).values() if value >= 0}))


def nearest(name, x):
    """Nearest value to each |x|, ties to the even code, saturated: by comparing with all midpoints."""
    table = magnitudes(name)
    midpoints = (table[1:] + table[:-1]) / 2  # exact in float64
    above = np.searchsorted(midpoints, np.abs(x), side="left")
    # on a midpoint, the even code is below if the code below is even
    on_midpoint = (above < len(midpoints)) & (
        midpoints[np.minimum(above, len(midpoints) - 1)] == np.abs(x)
    )
    above = above + (on_midpoint & (above % 2 == 1))
    return np.copysign(table[above], x)
