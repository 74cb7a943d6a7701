//! Cost of one query of the timing model: the simulator makes millions.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use kvlane_core::timing::{StepShape, TimingModel};

fn step_secs(criterion: &mut Criterion) {
    let mut mixed = StepShape::default();
    mixed.add_prefill(8000, 2000);
    (0..48).for_each(|_| mixed.add_decode(5000));
    let mut decode = StepShape::default();
    (0..48).for_each(|_| decode.add_decode(5000));
    for name in ["qwen3-32b@h100x2", "qwen3-30b-a3b@h200", "deepseek-v3@h200x8"] {
        let cost = TimingModel::preset(name).expect("a preset").compile();
        criterion
            .bench_function(&format!("step_secs/mixed/{name}"), |b| b.iter(|| cost.secs(black_box(&mixed))));
        criterion.bench_function(&format!("step_secs/decode/{name}"), |b| {
            b.iter(|| cost.secs(black_box(&decode)))
        });
    }
}

criterion_group!(benches, step_secs);
criterion_main!(benches);
