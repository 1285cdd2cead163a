"""What a model costs: parameters, FLOPs, bytes of state and of activations, and the peak of the fullest rank."""
