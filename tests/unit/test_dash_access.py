"""Who may read the page: each request that must be refused, and those that must not."""

from __future__ import annotations

import pytest

from lockstep.dashboard.access import Access

ACCESS = Access("s3cret-token", frozenset({"node7"}))
OWN = {"host": "127.0.0.1:8686"}


def refusal(method: str = "GET", path: str = "/", query: str = "token=s3cret-token", **headers: str) -> tuple[int, str] | None:
    given = OWN | {name.replace("_", "-"): value for name, value in headers.items()}
    return ACCESS.refusal(method, path, given, query)


def test_the_right_token_is_let_in() -> None:
    assert refusal() is None
    assert refusal(query="", authorization="Bearer s3cret-token") is None
    assert refusal(method="HEAD") is None


@pytest.mark.parametrize(
    "query",
    ["", "token=", "token=s3cret-toke", "token=S3CRET-TOKEN", "token=s3cret-token&token=x", "tokens=s3cret-token", "token=%ff"],
)
def test_a_wrong_token_is_refused_with_a_sentence(query: str) -> None:
    found = refusal(query=query)
    assert found is not None
    assert found[0] == 403
    assert found[1].endswith(".")


def test_a_wrong_bearer_is_refused_even_with_the_right_query() -> None:
    assert refusal(authorization="Bearer other") is not None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_everything_but_reading_is_refused(method: str) -> None:
    found = refusal(method=method)
    assert found is not None
    assert found[0] == 405


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9", "localhost:8686", "[::1]:8686", "node7:8686", "NODE7", "10.1.2.3:80", "run.localhost"]
)
def test_names_of_this_machine_are_answered(host: str) -> None:
    assert refusal(host=host) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8686", "", "localhost.evil", "a@127.0.0.1", "127.0.0.1:x"]
)
def test_a_name_that_was_pointed_here_is_refused(host: str) -> None:
    found = refusal(host=host)
    assert found is not None
    assert found[0] == 403


def test_pages_of_other_sites_are_refused() -> None:
    assert refusal(origin="http://evil.example") is not None
    assert refusal(origin="null") is not None
    assert refusal(origin="http://[bad") is not None
    assert refusal(sec_fetch_site="cross-site", sec_fetch_mode="cors") is not None
    assert refusal(sec_fetch_site="cross-site", sec_fetch_mode="navigate") is None
    assert refusal(origin="http://127.0.0.1:8686") is None


def test_files_of_the_package_need_no_token_but_the_right_name() -> None:
    assert refusal(path="/static/page.css", query="") is None
    assert refusal(path="/static/page.css", query="", host="evil.example") is not None
    assert refusal(path="/staticx", query="") is not None
