"""Names that Megatron-core imports."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


fp8_autocast = nullcontext
