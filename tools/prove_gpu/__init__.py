"""What only a GPU can prove: Transformer Engine against our modules, fp8, layouts over NCCL, throughput."""
