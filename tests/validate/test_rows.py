"""Rows -> model, cluster, plan and seconds: worked by hand from the shipped rows."""

import gzip
from pathlib import Path

import pytest

from tutti.errors import DataError
from tutti.validation.published_rows import PublishedRow, Uncosted, load_rows
from tutti.validation.row_specs import cluster_of
from tutti.validation.scoring import case_of

ROWS = {row.row_id: row for row in load_rows(None)}


def changed(row_id: str, **cells: str) -> PublishedRow:
    return PublishedRow(cells={**ROWS[row_id].cells, **cells})


def test_the_shipped_rows_are_many_and_each_says_where_it_is_from() -> None:
    assert len(ROWS) > 2000
    assert all(row.text("source") and row.text("evidence") for row in ROWS.values())


def test_a_megatron_row() -> None:
    """GPT-39.1B on 512 A100: tensor 8, pipeline 2, data 32; 138 TFLOP/s a GPU with the recomputed forward."""
    row = ROWS["sc21t1-0005"]
    case = case_of(row)
    assert case.plan.mesh == {"stage": 2, "replicate": 32, "split": 8}
    assert case.plan.batch.global_batch_size == 1536
    assert case.plan.batch.num_microbatches == 1536 // (32 * 4)
    assert case.cluster.device_count == 512
    network = case.cluster.link("network")
    assert network is not None
    assert network.bandwidth_bytes_per_s == 8 * 25e9
    assert case.model.parameters == pytest.approx(39.1e9, rel=0.01)
    layers, hidden, seq = 48, 8192, 2048
    flops = 96 * 1536 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert case.measured_s == pytest.approx(flops / (138e12 * 512), rel=0.01)


def test_a_fully_sharded_row_in_tokens_a_second() -> None:
    row = next(row for row in ROWS.values() if row.family == "mpt" and row.text("recompute") == "full")
    case = case_of(row)
    assert case.plan.mesh == {"shard": row.gpus}
    assert case.plan.sharding.level == 3
    assert any(rule.recompute for rule in case.plan.layout)
    tokens = row.whole("global_batch") * row.whole("seq_len")
    assert case.measured_s == pytest.approx(tokens / (row.value * row.gpus))


def test_selective_recomputing_drops_the_core_of_attention_only() -> None:
    row = next(row for row in ROWS.values() if row.family == "korthik5" and "selective" in row.text("recompute"))
    assert [rule.modules for rule in case_of(row).plan.layout] == ["blocks.*.attention"]


@pytest.mark.parametrize(
    ("text", "gpu", "bytes_per_s"),
    [
        ("8x200Gb/s HDR IB", "A100-80G-SXM", 200e9),
        ("A100 40GB with 1600 Gbps node-node interconnect (RoCE)", "a100_40gb", 200e9),
        ("400Gb/s RDMA per GPU", "H100-80G-SXM", 400e9),
        ("Omni-Path 4x100Gb/s per node", "A100-80G-SXM", 50e9),
        ("10Gb/s (P3) 50Gb/s (G4) as configured", "2x g4dn.12xlarge(4xT4)", 6.25e9),
        ("H100 80GB BF16", "h100_80gb", 400e9),
    ],
)
def test_printed_networks(text: str, gpu: str, bytes_per_s: float) -> None:
    row = PublishedRow(cells={"gpu": gpu, "n_gpus": "16", "gpus_per_node": "8", "inter_net": text})
    network = cluster_of(row).link("network")
    assert network is not None
    assert network.bandwidth_bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    "gpu",
    ["3x p3.8xlarge(4xV100) + 1x g4dn.12xlarge(4xT4)", "3x(4xV100)+ 1x(4xT4)", "3x p3.8xlarge and g4dn.12xlarge"],
)
def test_mixed_nodes_are_two_kinds_of_devices(gpu: str) -> None:
    row = PublishedRow(
        cells={
            "gpu": gpu, "n_gpus": "16", "gpus_per_node": "4",
            "intra_net": "170Gb/s (P3) 50Gb/s (G4)", "inter_net": "10Gb/s (P3) 50Gb/s (G4)",
        }
    )  # fmt: skip
    cluster = cluster_of(row)
    assert [(node.count, node.devices_per_node) for node in cluster.nodes] == [(3, 4), (1, 4)]
    network = cluster.link("network")
    assert network is not None
    assert network.bandwidth_bytes_per_s == 1.25e9


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "TPU v4"}, "not in the catalog"),
        ({"precision": "MXFP8"}, "8 or 4 bits"),
        ({"precision": ""}, "precision is not printed"),
        ({"arch": "transgan", "model": "TransGAN"}, "no architecture"),
        ({"dp": "7"}, "product of the printed degrees"),
        ({"metric": "fits"}, "does not determine the time"),
        ({"value": "0"}, "not positive"),
        ({"evidence": "formula-derived (not a measurement)"}, "not measured"),
        ({"layers": ""}, "layers is not printed"),
        ({"gpus_per_node": "8", "n_gpus": "16", "gpu": "P100", "dp": "16"}, "network"),
    ],
)
def test_what_cannot_be_costed_has_a_reason(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(Uncosted, match=reason):
        case_of(changed("meg2020-0001", **cells))


def test_tables_of_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no column row_id"):
        load_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(tmp_path / "none.csv")


def test_gzipped_tables_are_read_too(tmp_path: Path) -> None:
    row = ROWS["sc21t1-0001"]
    text = ",".join(row.cells) + "\n" + ",".join(f'"{value}"' for value in row.cells.values()) + "\n"
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert load_rows(tmp_path / "rows.csv.gz") == [row]


def test_a_row_above_its_devices_peak_is_not_a_measurement_of_what_it_names() -> None:
    """GPT-39.1B: 138 TFLOP/s a GPU, a quarter of them recomputed, are below the peak of 312; 450 are not. Convolutions
    may be above it (Winograd).
    """
    assert case_of(ROWS["sc21t1-0005"]).measured_s > 0
    with pytest.raises(Uncosted, match="more FLOPs a second than the devices' dense peak"):
        case_of(changed("sc21t1-0005", value="450"))
    assert case_of(ROWS["dle-0709"]).measured_s > 0


def test_sequences_of_512_that_the_same_table_shows_not_to_be_full() -> None:
    """V100, float32, 19 sequences a second: 6 x 512 tokens x 302 M parameters of 24 blocks are above 15.7 TFLOP/s."""
    assert ROWS["dle-0166"].value * 6 * 512 * 302e6 > 15.7e12
    with pytest.raises(Uncosted, match="cannot be full"):
        case_of(ROWS["dle-0166"])
    assert case_of(ROWS["dle-0126"]).plan.batch.global_batch_size == 128
