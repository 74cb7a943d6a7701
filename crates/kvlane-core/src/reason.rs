//! Why a policy picked its row.

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($( $(#[$attribute:meta])* $Reason:ident = $name:literal $text:literal ),+ $(,)?) => {
        /// Why a policy picked its row. A closed set, so that it can label a metric.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Reason {
            $( #[doc = $text] #[serde(rename = $name)] $(#[$attribute])* $Reason, )+
        }

        impl Reason {
            /// All reasons.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$Reason),+];

            /// The name in headers, metrics and receipts.
            pub const fn name(self) -> &'static str {
                match self {
                    $( Self::$Reason => $name, )+
                }
            }

            /// What it says, for explanations.
            pub const fn text(self) -> &'static str {
                match self {
                    $( Self::$Reason => $text, )+
                }
            }
        }
    };
}

reasons! {
    Random = "random" "drawn at random",
    Turn = "turn" "its turn",
    #[default]
    LeastLoaded = "least_loaded" "lowest load",
    PrefixHit = "prefix_hit" "longest cached prefix",
    PrefixMiss = "prefix_miss" "no endpoint holds enough of the prompt, so placed by load",
    Imbalance = "imbalance" "load was imbalanced, so placed by load",
    Saturated = "saturated" "the endpoint with the longest cached prefix was saturated",
    LowestCost = "lowest_cost" "lowest cost",
    Affinity = "affinity" "affinity of its session or prefix",
}
