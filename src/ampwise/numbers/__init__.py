"""What number formats hold and lose: formats and rounding, the census of a tensor, matmuls emulated in any format."""
