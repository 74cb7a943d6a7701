//! `kvlane mock_engine`.
use clap::Args;
#[derive(Args)]
pub(crate) struct MockEngineArgs {}
pub(crate) fn run(_: &MockEngineArgs) -> anyhow::Result<std::process::ExitCode> { anyhow::bail!("soon") }
