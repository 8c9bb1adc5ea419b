"""Streams that go on after their server was away: from the event, or the token, that their reader has come to."""
