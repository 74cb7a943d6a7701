//! Lets the linker leave Python's symbols undefined, where it has to be told (macOS).

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
