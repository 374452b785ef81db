"""A zoo of training programs: those that fail as real ones did, and healthy ones that look suspicious."""
