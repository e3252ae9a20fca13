"""Sessions: variables, queues and readers that any process of a cluster attaches to by name.

:class:`~dtrain.sessions.session.Session` is how they are used; :func:`find`, :func:`show` and
:func:`reset` look at them from outside.
"""

from dtrain.sessions.overview import find, reset, show

__all__ = ["find", "reset", "show"]
