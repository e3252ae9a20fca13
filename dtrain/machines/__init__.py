"""The pure machines: events in, commands out.

Nothing here reads a clock, opens a socket or starts a thread; ``tests/test_floors.py`` sees to
it.  ``handle(event, now)`` is a machine's only mutator.  An event that is illegal in the state
it meets raises (:class:`~dtrain.errors.ProtocolError`, :class:`~dtrain.errors.FencedError`)
and changes nothing.
"""
