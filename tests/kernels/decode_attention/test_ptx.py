"""`ptx` reports a hazard if a line that orders two accesses is deleted."""

import pytest

from tests.kernels.decode_attention import ptx

_PRODUCT = "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16 {%r1}; }"
_COPY = "@%p1 cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1];"

# Without a line that ends in // <hazard>, the kernel has this hazard.
_KERNEL = f"""
$L__BB0_1:
  ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1];
  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd1], {{%r1, %r2, %r3, %r4}};
  @%p2 bra $L__BB0_2;
  st.shared.v4.b32 [%rd1], {{%r1, %r2, %r3, %r4}};
  fence.proxy.async.shared::cta;
$L__BB0_2:
  fence.proxy.async.shared::cta;  // product after a store without fence.proxy.async
  bar.sync %r5, 128;  // product after a store without bar.sync
  {_PRODUCT}
  wgmma.commit_group.sync.aligned;
  {_PRODUCT}
  wgmma.commit_group.sync.aligned;  // copy without wgmma.wait_group after a product
  wgmma.wait_group.sync.aligned 1;  // copy without wgmma.wait_group after a product
  bar.sync %r5, 128;  // copy after a product without bar.sync
  {_COPY}
  ld.shared.b32 %r1, [%rd1];
  fence.proxy.async.shared::cta;  // copy after a load without fence.proxy.async
  bar.sync %r5, 128;  // copy after a load without bar.sync
  {_COPY}
  wgmma.wait_group.sync.aligned 0;  // store without wgmma.wait_group after a product
  @%p3 bra $L__BB0_1;
  bra.uni $L__BB0_3;
  {_COPY}
$L__BB0_3:
  ret;
"""
_LINES = _KERNEL.splitlines()


def test_what_is_ordered_is_not_flagged():
    assert ptx.hazards(_KERNEL) == []


@pytest.mark.parametrize("deleted", [i for i, line in enumerate(_LINES) if "//" in line])
def test_a_deleted_ordering_line_is_reported(deleted):
    fault = _LINES[deleted].split("// ")[1]
    messages = ptx.hazards("\n".join(line for i, line in enumerate(_LINES) if i != deleted))
    assert any(message.endswith(fault) for message in messages), messages


def test_a_weaker_wait_is_flagged():
    weaker = _KERNEL.replace("wait_group.sync.aligned 1", "wait_group.sync.aligned 2")
    assert "line 17: copy without wgmma.wait_group after a product" in ptx.hazards(weaker)


def test_a_program_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="without wgmma"):
        ptx.hazards("st.shared.b32 [%rd1], %r1;\nret;")
