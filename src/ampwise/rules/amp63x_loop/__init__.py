"""Loop: modes, schedules, data and calls around the step."""
