"""Rates in words, names, shares of cores, free networks."""

import ipaddress

import pytest

from tutti.errors import LabError
from tutti.lab.lab_network import burst_nbytes, free_subnet, parse_rate, rate_words, rates_of
from tutti.lab.lab_record import check_name
from tutti.lab.lab_run import cores_of


@pytest.mark.parametrize(
    ("words", "bits"),
    [("1gbit", 10**9), ("2.5Gbit", 25 * 10**8), ("100mbit", 10**8), ("250kbit", 250_000), ("unlimited", None)],
)
def test_rates_in_words_and_back(words: str, bits: int | None) -> None:
    assert parse_rate(words) == bits
    assert parse_rate(rate_words(bits)) == bits
    assert rate_words(bits) == words.lower()


@pytest.mark.parametrize("words", ["", "fast", "1", "1gb", "-1gbit", "0mbit", "10kbit", "1 g bit"])
def test_other_words_are_refused_with_an_example(words: str) -> None:
    with pytest.raises(LabError, match=r"100mbit|100kbit"):
        parse_rate(words)


def test_rates_that_no_link_can_be_limited_to_are_refused() -> None:
    assert parse_rate("10tbit") == 10**13
    with pytest.raises(LabError, match=r"99999999999tbit' is too high .* 10tbit or less, or unlimited"):
        parse_rate("99999999999tbit")


@pytest.mark.parametrize("name", ["", "../evil", "a b", "lab\n", "*", "läb"])
def test_names_that_may_not_be_asked_for(name: str) -> None:
    assert check_name("lab-1_x.y") == "lab-1_x.y"
    with pytest.raises(LabError, match="names no lab; give letters"):
        check_name(name)


def test_one_rate_is_of_all_hosts_and_a_list_has_one_each() -> None:
    assert rates_of("1gbit", 3) == (10**9,) * 3
    assert rates_of(["1gbit", "unlimited"], 2) == (10**9, None)
    with pytest.raises(LabError, match="2 rates for 3 hosts"):
        rates_of(["1gbit", "1gbit"], 3)


def test_a_bucket_holds_a_millisecond_and_never_less_than_a_segment() -> None:
    assert burst_nbytes(10**9) == 125_000
    assert burst_nbytes(10**8) == 70_000


@pytest.mark.parametrize(("hosts", "cores"), [(1, 4), (2, 4), (3, 8), (4, 4), (5, 7)])
def test_hosts_share_the_cores_without_overlap_where_there_are_enough(hosts: int, cores: int) -> None:
    shares = [cores_of(host, hosts, range(10, 10 + cores)) for host in range(hosts)]
    assert sorted(core for share in shares for core in share) == list(range(10, 10 + cores))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_hosts_than_cores_take_them_in_turn() -> None:
    assert [cores_of(host, 5, [3, 7]) for host in range(5)] == [[3], [7], [3], [7], [3]]


def test_a_network_that_the_machine_has_is_not_taken() -> None:
    networks = [ipaddress.IPv4Network(words) for words in ("10.213.0.0/24", "10.213.1.128/25", "192.168.0.0/16")]
    assert free_subnet([]) == "10.213.0"
    assert free_subnet(networks) == "10.213.2"
    with pytest.raises(LabError, match="is free"):
        free_subnet([ipaddress.IPv4Network("10.0.0.0/8")])
