"""A name that Megatron-core imports."""


class Float8Tensor:
    """No tensor is one."""
