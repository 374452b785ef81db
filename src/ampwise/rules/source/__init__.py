"""Rules about the source of a training script, which ``ampwise.check.source`` parses and never runs.

AMP1xx: order and ownership of the step; AMP2xx: state that must last as long as the run; AMP3xx: formats and hardware;
AMP4xx: numerics; AMP5xx: validation and speed. When the source is ambiguous, a rule stays silent.
"""
