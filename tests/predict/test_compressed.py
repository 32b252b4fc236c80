"""Predictions of plans that compress: bytes by the formula, less time where the network is slow, more memory."""

import pytest

from predict.examples import cluster, link, mlp, plan
from tutti.predict import predict
from tutti.spec.compression import bucket_sent_nbytes, parse_compression
from tutti.spec.plan import Sync

METHODS = ("bfloat16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k", "dgc", "top16-q4", "powersgd")


@pytest.mark.parametrize("words", METHODS)
def test_bytes_are_those_of_the_formula(words: str) -> None:
    how, model = parse_compression(words), mlp(512, 3)
    done = predict(model, cluster(), plan(ranks=4, sync=Sync(compress=how)))
    shape = (512, 512) if words == "powersgd" else (512 * 512,)
    assert done.sent_nbytes_per_rank == pytest.approx(bucket_sent_nbytes(how, [shape] * 3, 4, 4), rel=1e-9)
    assert done.sent_nbytes_per_rank < predict(model, cluster(), plan(ranks=4)).sent_nbytes_per_rank


def test_it_pays_on_a_slow_network_and_not_on_a_fast_one() -> None:
    for bandwidth, pays in ((1e7, True), (1e11, False)):
        hosts = cluster(devices_per_node=1, count=2, links=(link("node"), link("network", 1e-5, bandwidth)))
        exact = predict(mlp(), hosts, plan(ranks=2))
        short = predict(mlp(), hosts, plan(ranks=2, sync=Sync(compress=parse_compression("one-bit"))))
        assert (short.step_time_s.value < exact.step_time_s.value) == pays


def test_what_is_kept_back_is_held() -> None:
    exact, keeps = (
        predict(mlp(), cluster(), plan(ranks=2, sync=Sync(compress=how))).memory
        for how in (parse_compression("bfloat16"), parse_compression("one-bit"))
    )
    assert keeps.communication - exact.communication == pytest.approx(2 * 4 * 3 * 512 * 512)
