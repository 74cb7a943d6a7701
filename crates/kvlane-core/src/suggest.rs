//! Which name was meant by one that is not known.

/// Most names that are listed whole.
const LISTED_MAX: usize = 6;
/// Names that are suggested of a longer list.
const SUGGESTED_MAX: usize = 3;

/// Similarity from which one name may have been written for another.
const NEAR: f64 = 0.85;

/// What to write instead of `name`: one of `names`, or of the nearest of them if they are many. `place` says where the
/// whole list is.
pub fn suggest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>, place: &str) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    if names.len() <= LISTED_MAX {
        return format!("use {}", or(&names));
    }
    format!("did you mean {}? {place}", or(&nearest(name, names))).trim_end().to_owned()
}

/// The names that are nearest to `name`, the nearest first.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut near: Vec<(f64, &str)> =
        names.into_iter().map(|other| (strsim::jaro_winkler(name, other), other)).collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    near.into_iter().take(SUGGESTED_MAX).map(|(_, name)| name).collect()
}

/// Whether one name may have been written for the other.
pub fn is_near(name: &str, other: &str) -> bool {
    strsim::jaro(name, other) >= NEAR
}

/// Names joined by commas and `or`.
fn or(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => format!("`{one}`"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(|name| format!("`{name}`")).collect();
            format!("{} or `{last}`", first.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_list_the_nearest_names_are_suggested() {
        let few = ["error", "warn", "info"];
        assert_eq!(suggest("x", few, "See there."), "use `error`, `warn` or `info`");
        let many =
            ["host", "port", "reuse_port", "relay_threads", "body_memory", "extra_paths", "header_timeout"];
        let said = suggest("prot", many, "See there.");
        assert!(said.starts_with("did you mean `port`, ") && said.ends_with("? See there."), "{said}");
        assert_eq!(said.matches('`').count(), 6, "{said}");
        assert!(is_near("--prot", "--port") && is_near("--workers", "--worker-urls"));
        assert!(!is_near("--disable-health-check", "--disable-circuit-breaker"));
    }
}
