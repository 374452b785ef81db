"""Integrations with training frameworks (Lightning, Transformers, Accelerate) and with coding agents (MCP, skill)."""
