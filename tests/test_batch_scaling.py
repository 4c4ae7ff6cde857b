"""What a kernel's tile does to a batch."""

from plamo_study.arithmetic import kernels


def test_columns_left_over_by_a_tile_need_a_second_pass():
    for tile, two in ((4, {5, 6, 7, 9, 10, 11, 13, 14, 15}), (2, {3, 5, 7, 9, 11, 13, 15})):
        assert {n for n in range(1, 17) if kernels.weight_passes(n, tile) == 2} == two
