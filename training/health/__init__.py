"""What is wrong with the numbers: non-finite values, spikes, replicas that differ, stragglers, growing memory."""
