"""Rules about the text of a training script, read by ``ampwise.source`` and never run.

AMP1xx order and ownership of the step; AMP2xx what must live as long as the run; AMP3xx formats and hardware;
AMP4xx numerics; AMP5xx validation and speed. Where the source cannot tell, a rule stays silent.
"""
