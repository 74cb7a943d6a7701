//! `kvlane demo`.
use clap::Args;
#[derive(Args)]
pub(crate) struct DemoArgs {}
pub(crate) fn run(_: &DemoArgs) -> anyhow::Result<std::process::ExitCode> { anyhow::bail!("soon") }
