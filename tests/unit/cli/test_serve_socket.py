"""The socket that the service listens on."""

from __future__ import annotations

import socket

from genius_search.cli.serve import _bind


def test_a_response_is_sent_at_once_and_does_not_wait_for_a_receipt():
    with _bind("127.0.0.1", 0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
