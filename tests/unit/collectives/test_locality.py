"""Places of ranks on their hosts, from what all ranks say of themselves."""

from __future__ import annotations

import pytest

from opensmd.collectives.locality import Claim, Locality, localities, own_claim
from opensmd.collectives.stores.listening import speaks_of_other_hosts


def silent(hosts: str) -> list[Claim]:
    return [Claim(host, f"node-{host}") for host in hosts]


def agents(places: str) -> list[Claim]:
    """Ranks of one host, by the letter of the agent that started them and the number it gave them."""
    return [Claim("x", "node-x", agent, int(number), 2) for agent, number in places.split()]


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        (silent("aab"), [(0, 2), (1, 2), (0, 1)]),
        (silent("abab"), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (agents("a0 a1 b0 b1"), [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ([Claim("x", "n", "", 1), Claim("x", "n", "", 0)], [(1, 2), (0, 2)]),
    ],
    ids=["by block", "in turn", "two agents on one host", "numbers of their own"],
)
def test_ranks_of_one_host_are_numbered_in_their_order_unless_a_launcher_has_numbered_them(
    claims: list[Claim], expected: list[tuple[int, int]]
) -> None:
    assert localities(claims) == [Locality(*place) for place in expected]


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (
            [Claim("a", "pod-0", "", 0, 2), Claim("b", "pod-1", "", 1, 2)],
            "rank 0 says LOCAL_RANK=0 and LOCAL_WORLD_SIZE=2, .* 'pod-0' had 1 of them: rank 0",
        ),
        (
            [Claim("a", "pod-0"), Claim("b", "pod-1", "", 1)],
            "rank 1 says LOCAL_RANK=1, .* 'pod-1' had 1 of them: rank 1",
        ),
        (
            [Claim("a", "node", "", 0), Claim("a", "node", "", 0)],
            r"rank 0 says LOCAL_RANK=0, .* had 2 of them: rank 0 \(LOCAL_RANK=0\), rank 1 \(LOCAL_RANK=0\)",
        ),
        (
            [Claim("a", "node"), Claim("a", "node", "", 0)],
            r"rank 1 says LOCAL_RANK=0, .* rank 0 \(no LOCAL_RANK\), rank 1 \(LOCAL_RANK=0\)",
        ),
    ],
    ids=["a size of other hosts", "a number beyond the host", "one number twice", "a number that is taken"],
)
def test_a_claim_that_does_not_fit_what_was_found_is_refused_with_both(
    claims: list[Claim], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        localities(claims)


def test_what_the_environment_says_of_another_group_is_no_claim() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert own_claim(1, 4, environ).local_rank == 1
    assert own_claim(1, 2, environ).local_rank is None


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        ("localhost", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        ("localhost", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}, False),
        ("10.0.0.2", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ("localhost", {}, False),
    ],
)
def test_a_pods_master_that_is_told_localhost_may_have_ranks_on_other_hosts(
    host: str, environ: dict[str, str], expected: bool
) -> None:
    assert speaks_of_other_hosts(host, 2, environ) is expected
