"""The port at which the ranks of a world meet."""

from __future__ import annotations

import socket

import pytest

from rlhf.learner.port import free_port


def test_a_port_is_held_for_the_server_that_will_listen_there() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
        pass
    assert free_port() != port
