"""The cheapest format for each module with which loss and gradients stay what they are in FP32, within a tolerance."""
