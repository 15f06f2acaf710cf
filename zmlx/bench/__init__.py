"""The benchmark: what every op costs, beside what the machine allows and what others need.

measure      interleaved rounds              summary    medians and their intervals
anchors      copy, read, matrix product      memory     pages kept, peaks
variants     an op in zmlx and in MLX        torch_variants   … and in torch
work         bytes and operations            rows       one row of the report
run          which rows                      result     rows as data and JSON
bars         what the project promises       overhead   compiling, importing, calling
model        a patched model in training, in processes of its own
report       on a terminal                   page       docs/benchmarks.md
compare      two runs                        update     rows that are measured again
plot         time against size
selftest     ops with a known time           environment  machine and versions
zig          the Zig front end
"""
