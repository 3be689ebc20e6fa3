"""Entry points that other frameworks' training loops and engines call.

``transformers`` and ``lightning`` have callbacks for their trainers, which share ``callback``.
``generation`` splits ``generate`` into prefill and decode. ``deepspeed`` replaces an engine's
profiler. Each file imports its framework, so none is imported here.

``testing`` has ``assert_flops`` for tests, and ``pytest_plugin`` the fixture of that name.
"""
