"""Entry points that users call: each owns the lifecycle of a run and restores the program's state.

``FlopCounterMode`` (counter) counts what runs in a block. ``profile_model`` (model) calls a model,
first timed and then counted. ``get_model_profile`` (model_totals) and ``FlopsProfiler``
(flops_profiler) have DeepSpeed's interface. ``StepProfiler`` (training) profiles one optimizer step
of a loop, and ``FlopMeter`` (meter) follows every step.
"""
