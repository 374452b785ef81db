"""Formats: which dtype, with which scaler, optimizer and API."""
