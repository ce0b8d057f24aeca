"""Programs of XLA for tests."""

# ruff: noqa: E501  (XLA prints one instruction per line)

STEP = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/code/train.py"
2 "/usr/lib/python3/optax/update.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (param_0: f32[16,16], param_1: f32[16,16]) -> f32[16,16] {
  %param_0 = f32[16,16]{1,0} parameter(0)
  %param_1 = f32[16,16]{1,0} parameter(1)
  %scaled = f32[16,16]{1,0} multiply(%param_1, %param_1), metadata={op_name="jit(step)/mul" stack_frame_id=1}
  ROOT %updated = f32[16,16]{1,0} subtract(%param_0, %scaled), metadata={op_name="jit(step)/sub" stack_frame_id=1}
}

ENTRY %main (w: f32[16,16], x: f32[64,16]) -> (f32[16,16], f32[]) {
  %w = f32[16,16]{1,0} parameter(0), metadata={op_name="w"}
  %x = f32[64,16]{1,0} parameter(1), metadata={op_name="x"}
  %zero = f32[] constant(0)
  %hidden = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(layer1)/dot_general" stack_frame_id=2}
  %active = f32[64,16]{1,0} tanh(%hidden), metadata={op_name="jit(step)/jvp(layer1)/tanh" stack_frame_id=2}
  %sum = f32[] reduce(%active, %zero), dimensions={0,1}, to_apply=%add, metadata={op_name="jit(step)/jvp()/reduce_sum" stack_frame_id=2}
  %slope = f32[64,16]{1,0} cosine(%active), metadata={op_name="jit(step)/transpose(jvp(layer1))/mul" stack_frame_id=2}
  %gradient = f32[16,16]{1,0} dot(%x, %slope), lhs_contracting_dims={0}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(layer1))/dot_general" stack_frame_id=2}
  %fusion = f32[16,16]{1,0} fusion(%w, %gradient), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/sub" stack_frame_id=1}
  ROOT %tuple = (f32[16,16]{1,0}, f32[]) tuple(%fusion, %sum)
}
"""

LOOP = """HloModule jit_loop, is_scheduled=true, entry_computation_layout={}

%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[], f32[256]{0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%count, %one)
  %value = f32[256]{0} get-tuple-element(%state), index=1
  %sorted = f32[512]{0} concatenate(%value, %value), dimensions={0}
  %halved = f32[256]{0} slice(%sorted), slice={[0:256]}
  ROOT %again = (s32[], f32[256]{0}) tuple(%next, %halved)
}

%condition (now: (s32[], f32[256])) -> pred[] {
  %now = (s32[], f32[256]{0}) parameter(0)
  %reached = s32[] get-tuple-element(%now), index=0
  %limit = s32[] constant(10)
  ROOT %less = pred[] compare(%reached, %limit), direction=LT
}

ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %start = s32[] constant(0)
  %first = s32[] copy(%start)
  %carried = f32[256]{0} copy(%x)
  %init = (s32[], f32[256]{0}) tuple(%first, %carried)
  %while = (s32[], f32[256]{0}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[256]{0} get-tuple-element(%while), index=1
}
"""


def entry(*lines, header=""):
    """A program of one computation; arguments are named in its lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made, is_scheduled=true{header}\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
