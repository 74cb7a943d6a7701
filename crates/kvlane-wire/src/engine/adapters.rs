//! Reads which adapters (LoRA) an engine's requests use from its metrics page.

use kvlane_core::adapters::AdapterReport;
use kvlane_core::request::AdapterKey;

use crate::prometheus::{Sample, samples};

/// vLLM's sample (`vllm/v1/metrics/loggers.py`): one for each combination of adapters that there was, with the time of the last as
/// its value. SGLang and llama.cpp have none.
const INFO: &str = "vllm:lora_requests_info";
/// Most names that are read from a label.
const NAMES_MAX: usize = 1024;

/// The adapters of an engine's requests, and its slots; `None` if the page does not tell.
pub fn adapter_report(page: &str) -> Option<AdapterReport> {
    let told = samples(page).filter(|sample| sample.name == INFO && sample.value.is_finite());
    let last = told.max_by(|one, other| one.value.total_cmp(&other.value))?;
    let slots = last.label("max_lora").and_then(|slots| slots.trim().parse().ok()).filter(|slots| *slots > 0);
    Some(AdapterReport {
        slots,
        running: keys(&last, "running_lora_adapters"),
        waiting: keys(&last, "waiting_lora_adapters"),
    })
}

/// The adapters in a label: names separated by commas.
fn keys(sample: &Sample<'_>, label: &str) -> Vec<AdapterKey> {
    let names = sample.label(label).unwrap_or_default();
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
    let mut keys: Vec<_> = names.take(NAMES_MAX).map(|name| AdapterKey::named(name.as_bytes())).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_combination_of_adapters_counts() {
        let info = |labels: &str, at: &str| format!("vllm:lora_requests_info{{{labels}}} {at}\n");
        let page = info(r#"max_lora="0",running_lora_adapters="",waiting_lora_adapters="""#, "1.7e+09")
            + &info(
                r#"max_lora="4",running_lora_adapters="sql, poem,sql",waiting_lora_adapters="law""#,
                "1.8e+09",
            )
            + &info(r#"max_lora="4",running_lora_adapters="law",waiting_lora_adapters="""#, "1.75e+09");
        let key = |name: &str| AdapterKey::named(name.as_bytes());
        let mut running = vec![key("sql"), key("poem")];
        running.sort_unstable();
        let expected = AdapterReport { slots: Some(4), running, waiting: vec![key("law")] };
        assert_eq!(adapter_report(&page), Some(expected));
    }

    #[test]
    fn a_page_without_adapters_tells_nothing() {
        assert_eq!(adapter_report("vllm:num_requests_running 0\nvllm:lora_requests_info NaN\n"), None);
        let unknown = adapter_report("vllm:lora_requests_info{max_lora=\"many\"} 5\n");
        assert_eq!(unknown, Some(AdapterReport::default()), "slots that are no number");
    }
}
