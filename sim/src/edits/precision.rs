//! stub
use super::{Changes, Unfit, End};
use super::program::Program;
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precision { AutocastBf16, AutocastFp16, Bf16, Fp32 }
pub(super) fn cast(_: &mut Program<'_>, _: Precision, _: End, _: &mut Changes) -> Result<(), Unfit> { Err(Unfit("not yet".into())) }
pub(super) fn adapt(_: &mut Program<'_>, _: u64, _: End, _: &mut Changes) -> Result<(), Unfit> { Err(Unfit("not yet".into())) }
