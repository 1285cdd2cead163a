"""A hook: Transformer Engine as it is imported with NVTE_CPU_OFFLOAD_V1=1, which the warm process did without."""

from transformer_engine.pytorch import cpu_offload
from transformer_engine.pytorch.attention.dot_product_attention import backends

cpu_offload.NVTE_CPU_OFFLOAD_V1 = backends.NVTE_CPU_OFFLOAD_V1 = True
