"""The enums that the real extension binds (common/util/pybind_helper.h), with the values of its headers."""

import enum

DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
DType = enum.IntEnum("DType", DTYPES | {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10})  # type: ignore[misc]


class NVTE_Fused_Attn_Backend(enum.IntEnum):  # noqa: N801
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


def _counted(name: str, members: str, prefix: str = "") -> type[enum.IntEnum]:
    """From 0, in the order given."""
    return enum.IntEnum(name, [prefix + member for member in members.split()], start=0)  # type: ignore[return-value]


NVTE_Bias_Type = _counted("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI", "NVTE_")
NVTE_Mask_Type = _counted(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_",
)
NVTE_Softmax_Type = _counted("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX", "NVTE_")
NVTE_QKV_Format = _counted(
    "NVTE_QKV_Format", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET", "NVTE_"
)
NVTE_QKV_Layout = _counted(
    "NVTE_QKV_Layout",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD",
    "NVTE_",
)
Float8BlockScaleTensorFormat = _counted("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _counted("CommOverlapType", "RS AG")
CommOverlapAlgo = _counted(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
    "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
)
FP8FwdTensors = _counted(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _counted("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3")
NVTERoutingMapFormat = _counted("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
