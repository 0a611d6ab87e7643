"""Reading a schedule: bundles, loops, regions, copied bytes and stalls, on a hand-made dump with known answers."""

from pathlib import Path

import pytest

from pallas_kernels.inspection.llo_bundles import Span, parse_schedule
from pallas_kernels.inspection.roofline import products, roofline
from pallas_kernels.inspection.scoreboard import TIMINGS, cycles

DUMP = """= control target key start
LB: loop body
= control target key end
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 } /* Start region 3 */
   0x2   : > { %5 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s3, /*size_in_granules=*/64, /*vmem=*/%s4 /*
base_bounds: (1, 2) */ }
   0x3   : > { %7 = vmatmul.f32.vlgmr.msra.gmra.mxu0 %v1  ;;  %8 = sbr.rel (%p1) target = $region9 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   : >> { %9 = vst [vmem:[#allocation2]] %v9 }
   0x9   : > { %v3 = vpop.f32.mrf.mxu0 } /* Start region 9 */
   0xa   : > { %11 = sbr.rel (!%p2) target = $region3 }
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  { %12 = vst [vmem:[#allocation2]] %v3 }
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "1-kernel.1-72-final_bundles.txt"
    path.write_text(DUMP)
    return path


def test_structure(dump: Path) -> None:
    schedule = parse_schedule(dump)
    assert len(schedule.bundles) == 16
    assert schedule.loops == (Span(1, 15),)
    assert schedule.regions == (Span(8, 9),)
    assert [bundle.depth for bundle in schedule.bundles[:3]] == [0, 1, 1]
    assert [op.name for op in schedule.bundles[3].operations] == ["vmatmul.f32.vlgmr.msra.gmra.mxu0", "sbr.rel"]


def test_a_result_is_waited_for(dump: Path) -> None:
    schedule = parse_schedule(dump)
    timing = TIMINGS["v5e"]
    # The matmul issues in cycle 3, its result is popped at 3 + latency, and six bundles follow it.
    assert cycles(schedule.bundles, timing) == 3 + timing.matmul_latency + 7


def test_roofline_of_the_loop(dump: Path) -> None:
    found = roofline(parse_schedule(dump), TIMINGS["v5e"])
    assert found.dma_bytes == 64 * 32
    assert found.bundles == 14
    assert found.ratio() == pytest.approx(found.cycles / (2048 / (819e9 / 1.5e9)))


def test_products_of_the_loop(dump: Path) -> None:
    [found] = products(parse_schedule(dump), TIMINGS["v5e"])
    # One product of 8 rows, a loop of 14 bundles from 0x1 on: it issues in cycle 2, and six bundles follow its result's.
    assert (found.matmul_cycles, found.cycles) == (8, 2 + TIMINGS["v5e"].matmul_latency + 6)


def test_a_gap_in_the_addresses_is_refused(dump: Path) -> None:
    dump.write_text(DUMP.replace("   0x5   :  {}\n", ""))
    with pytest.raises(ValueError, match="addresses should be dense"):
        parse_schedule(dump)
