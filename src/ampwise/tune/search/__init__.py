"""Find the cheapest format for each module with which loss and gradients stay within a tolerance of FP32's."""
