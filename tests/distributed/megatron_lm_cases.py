"""What the loops like Megatron-LM's are run with; apart from them, so that tests need not load megatron-core."""

from dataclasses import dataclass

from gnmr_megatron.control.config import ControlConfig

CLIP_GRAD = 0.3
STEPS, ACTIVE_STEPS, SAVED_STEP = 2, 6, 3
ACTIVE = ControlConfig(
    alpha=1.05, beta=1.05, delta=1, warmup_steps=1, max_recovered=2, lock_steps=1, check_interval=0
)


@dataclass(frozen=True)
class Case:
    """A layout, a kind of optimizer and a type."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    bf16: bool = False
    sharded: bool = False
    chained: bool = False
    is_bare: bool = False


CASES = {
    "fp32_tp2_pp2": Case(tp=2, pp=2),
    "bf16_tp2_dp2": Case(tp=2, bf16=True),
    "bf16_tp2_dp2_bare": Case(tp=2, bf16=True, is_bare=True),
    "sharded_tp2_dp2": Case(tp=2, bf16=True, sharded=True),
    "chained_pp2_vpp2_dp2": Case(pp=2, vpp=2, sharded=True, chained=True),
}
