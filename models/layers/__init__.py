"""What we hand to megatron-core's extension points: norm, attention, the layer specifications."""
